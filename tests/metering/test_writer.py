"""Writers beyond what test_kernels.py says: going on after a predecessor, and counting TokenBatches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.messages import FINISH_MASK, META, NO_TOKEN, SILENT, Finish, TokenBatch
from evap.metering.page import PageReader, Row
from evap.metering.writer import BatchCounter, CompiledMeter, Join, NumpyMeter
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


def batch(records: list[tuple[int, int, int, int]]) -> TokenBatch:
    """(slot, generation, token, flags)"""
    columns = np.array(records, np.int32).reshape(-1, 4).T
    return TokenBatch(columns[0], columns[1], columns[2], columns[0] * 0, columns[3].astype(np.uint8))


def test_batches_are_counted_and_shown_when_told() -> None:
    page, _ = new_memory(SLOTS, 1)
    counter, reader = BatchCounter(page), PageReader(page)
    counter.open(0, 4, 100)
    counter.open(3, 5, 200)
    counter.count(batch([(0, 4, 60, META), (0, 4, 7, 0), (3, 5, 7, 0), (0, 4, 8, 0), (3, 4, 1, 0)]), EPOCH_NS + 1000)
    assert reader.row(0) == Row(4, 0, 100, 0, 0, 0, 0, 0, 0)
    counter.publish(EPOCH_NS + 2000)
    assert reader.row(0) == Row(4, 0, 100, 60, 2, 2, 1, 1, 1)
    assert reader.row(3) == Row(5, 0, 200, 0, 1, 1, 1, 1, 1)
    counter.count(batch([(0, 4, 2, Finish.STOP | SILENT), (3, 5, 0, Finish.CANCELLED | NO_TOKEN)]), EPOCH_NS + 3000)
    counter.publish(EPOCH_NS + 3000)
    assert reader.row(0) == Row(4, Finish.STOP, 100, 60, 3, 3, 1, 3, 2)
    assert reader.row(3) == Row(5, Finish.CANCELLED, 200, 0, 1, 1, 1, 1, 1)
    line = reader.step_line()
    assert line is not None
    assert (line.step, line.computed) == (2, 4)


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, SLOTS - 1), st.integers(1, 2), st.integers(0, 99),
                st.sampled_from([0, 0, 0, SILENT | 1, 2, NO_TOKEN | 3, META]),
            ),
            max_size=8,
        ),
        max_size=6,
    )
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_counts_are_those_of_counting_one_by_one(batches: list[list[tuple[int, int, int, int]]]) -> None:
    page, _ = new_memory(SLOTS, 1)
    counter, reader = BatchCounter(page), PageReader(page)
    computed, cached, finish = [0] * SLOTS, [0] * SLOTS, [0] * SLOTS
    for slot in range(SLOTS):
        counter.open(slot, 1, 10)
    for n, records in enumerate(batches):
        for slot, generation, token, flags in records:
            if generation == 1:
                computed[slot] += not flags & (NO_TOKEN | META)
                cached[slot] = token if flags & META else cached[slot]
                finish[slot] = flags & FINISH_MASK or finish[slot]
        counter.count(batch(records), EPOCH_NS + n)
        if n % 2:
            counter.publish(EPOCH_NS + n)
    counter.publish(EPOCH_NS)
    for slot in range(SLOTS):
        row = reader.row(slot)
        assert row is not None
        assert (row.computed, row.cached, row.finish) == (computed[slot], cached[slot], finish[slot])
