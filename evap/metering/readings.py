"""What `/metrics` says of metering: name -> (help, function that reads the value)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from evap.metering.counters import Counters
from evap.metering.energy import Energy
from evap.metering.recorder import Recorder
from evap.metering.sink import Sink

Readings: TypeAlias = dict[str, tuple[str, Callable[[], float]]]


def gauges(recorder: Recorder | None, behind: Callable[[], str]) -> Readings:
    """behind: why the sink is; empty when all is well."""
    if recorder is None:
        return {}
    return {
        "ledger_pending": ("Records that are not in the ledger yet", lambda: float(recorder.pending)),
        "ledger_spool_bytes": ("Bytes of records in the spool file", lambda: float(recorder.spooled)),
        "ledger_ok": ("1 while the ledger can be written", lambda: float(not recorder.trouble)),
        "sink_ok": ("1 while the usage sink answers, or there is none", lambda: float(not behind())),
    }


def counters(recorder: Recorder | None, sink: Sink | None, pages: Counters | None, energy: Energy | None) -> Readings:
    found: Readings = {}
    if pages is not None:
        found["meter_mismatches"] = ("Counts that differ from the engine's own", lambda: float(pages.mismatches))
    if energy is not None:
        found["energy_joules_estimated"] = ("Energy of the GPU, by NVML", lambda: energy.total_mj / 1e3)
    if recorder is not None:
        found["ledger_records"] = ("Records committed to the ledger", lambda: float(recorder.durable))
        if sink is not None:
            found["sink_records"] = ("Records copied to the usage sink", lambda: float(sink.copied))
    return found
