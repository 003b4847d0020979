"""What /metrics says of metering."""

from __future__ import annotations

from evap.metering import readings
from evap.metering.counters import Counters
from evap.metering.energy import Energy
from tests.metering.test_energy import Board, usage


def test_what_is_not_there_is_not_said() -> None:
    assert readings.gauges(None, lambda: "") == {}
    assert readings.counters(None, None, None, None) == {}


def test_an_engine_and_a_gpu_without_a_ledger() -> None:
    pages, energy = Counters(4, 1, None, ahead=False, now_ns=0, unix_ns=0), Energy(Board(1500))
    energy.tick(0, [("a", usage(1))])
    pages.mismatches = 2
    found = readings.counters(None, None, pages, energy)
    assert {name: read() for name, (_, read) in found.items()} == {
        "meter_mismatches": 2.0, "energy_joules_estimated": 1.5,
    }  # fmt: skip
    pages.close()
