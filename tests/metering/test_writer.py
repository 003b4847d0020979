"""Writers beyond what test_kernels.py says: going on after a predecessor, and counting TokenBatches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evap.messages import SILENT, Finish
from evap.metering.page import PageReader, Row
from evap.metering.writer import CompiledMeter, Join, NumpyMeter
from evap.ring import RingReader
from tests.metering.reference import EPOCH_NS, int32, new_memory, records_of

SLOTS = 5


@pytest.fixture(params=["numpy", "compiled"])
def new_meter(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param == "numpy":
        return NumpyMeter
    library: Path = request.getfixturevalue("host_library")
    return lambda *memory: CompiledMeter(library, *memory)


def test_a_new_writer_goes_on_where_the_last_one_stopped(new_meter: Callable[..., Any]) -> None:
    page, ring = new_memory(SLOTS, 16)
    reader, tokens = PageReader(page), RingReader(ring, 16)
    for life in range(3):
        meter = new_meter(page, ring, 16)
        meter.begin([Join(0, life, 4)], EPOCH_NS + 1000)
        for n in range(2):
            meter.step(int32([0], (1,)), int32([life * 10 + n], (1, 1)), None, EPOCH_NS + 3000)
    line = reader.step_line()
    assert line is not None
    assert (line.step, line.records, line.computed, line.busy_us) == (6, 6, 6, 12)
    assert reader.row(0) == Row(2, 0, 4, 0, 2, 2, 3, 3, 2)
    assert [r[2] for r in records_of(tokens.poll())] == [0, 1, 10, 11, 20, 21]


def test_tokens_of_both_widths_are_taken(new_meter: Callable[..., Any]) -> None:
    page, ring = new_memory(SLOTS, 16)
    meter, tokens = new_meter(page, ring, 16), RingReader(ring, 16)
    meter.begin([Join(1, 3, 4)], EPOCH_NS)
    for dtype in (np.int32, np.int64):
        meter.step(int32([1, -1], (2,)), np.array([[7], [9]], dtype), int32([1, 1], (2,)), EPOCH_NS)
    assert [r[2] for r in records_of(tokens.poll())] == [7, 7]


def test_speculative_tokens_past_the_end_are_computed_but_not_emitted(new_meter: Callable[..., Any]) -> None:
    page, ring = new_memory(SLOTS, 16)
    meter, tokens = new_meter(page, ring, 16), RingReader(ring, 16)
    meter.begin([Join(0, 1, 4, eos=2), Join(1, 1, 4, limit=2)], EPOCH_NS)
    for _ in range(2):  # asynchronous scheduling runs a step past the end
        meter.step(int32([0, 1], (2,)), int32([[5, 2, 8, 9, 9]] * 2, (2, 5)), int32([5, 3], (2,)), EPOCH_NS)
    reader = PageReader(page)
    rows = [reader.row(0), reader.row(1)]
    assert [(r.finish, r.computed, r.emitted) for r in rows if r is not None] == [
        (Finish.STOP, 10, 2),
        (Finish.LENGTH, 6, 2),
    ]
    assert records_of(tokens.poll()) == [
        (0, 1, 5, 0, 0),
        (0, 1, 2, 1, Finish.STOP | SILENT),
        (1, 1, 5, 0, 0),
        (1, 1, 2, 1, Finish.LENGTH),
    ]


def test_partial_prefills_are_steps_without_tokens(new_meter: Callable[..., Any]) -> None:
    page, ring = new_memory(SLOTS, 16)
    meter, tokens = new_meter(page, ring, 16), RingReader(ring, 16)
    meter.begin([Join(0, 1, 4000)], EPOCH_NS)
    for count in (0, 0, 1):
        meter.step(int32([0], (1,)), int32([5], (1, 1)), int32([count], (1,)), EPOCH_NS + 2000)
    assert PageReader(page).row(0) == Row(1, 0, 4000, 0, 1, 1, 2, 2, 3)
    assert len(records_of(tokens.poll())) == 1
