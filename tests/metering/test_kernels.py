"""kernels.cu, run on the CPU, against a plain model: any batches, widths, block sizes; any order of visible stores."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evap.metering.page import PageReader
from evap.metering.writer import CompiledMeter, Join, NumpyMeter
from evap.ring import RingReader
from tests.metering.reference import EPOCH_NS, Reference, int32, new_memory, records_of

SLOTS = 6
WIDTH = 3
CAPACITY = 64
many = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

joins = st.lists(
    st.builds(
        Join,
        st.integers(-1, SLOTS),
        st.integers(0, 65535),
        st.integers(0, 2**31 - 1),
        st.integers(0, 1000),
        st.sampled_from([1, 2, 5, 2**31]),
        st.sampled_from([-1, 7]),
    ),
    max_size=4,
    unique_by=lambda j: j.slot,
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Join], list[int], list[list[int]], list[int] | None, int, int, bool]:
    slots = draw(st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True))
    slots += [-1] * draw(st.integers(0, 2))
    slots = draw(st.permutations(slots)) if slots else slots
    width = draw(st.integers(1, WIDTH))
    tokens = [[draw(st.sampled_from([7, 1, -3, 2**31 - 1])) for _ in range(width)] for _ in slots]
    counts = draw(st.none() | st.lists(st.integers(-1, width + 1), min_size=len(slots), max_size=len(slots)))
    return draw(joins), list(slots), tokens, counts, width, draw(st.integers(0, 10**9)), draw(st.booleans())


def drive(meter: Any, reference: Reference, script: list[Any], *, wide: bool = False) -> None:
    """The same steps for both. Times only go up."""
    now = EPOCH_NS
    for join, slots, tokens, counts, width, pause, with_ring in script:
        now += pause
        rows = len(slots)
        given_counts = None if counts is None else int32(counts, (rows,))
        sampled = int32(tokens, (rows, width)).astype(np.int64 if wide else np.int32)
        for one in (meter, reference):
            one.begin(join, now)
            one.step(int32(slots, (rows,)), sampled, given_counts, now + 777_000, ring=with_ring)
        now += 777_000


def check(page: Any, memory: Any, reference: Reference, script: list[Any]) -> None:
    reader = PageReader(page)
    for slot in range(SLOTS):
        account = reference.accounts.get(slot)
        assert reader.row(slot) == (account.row() if account else None)
    values, whole = reader.rows()
    assert set(np.flatnonzero(whole)) == set(reference.accounts)
    for slot, account in reference.accounts.items():
        generation, finish, *rest = account.row()
        assert values[slot].tolist() == [generation | finish << 16, *rest]
    if script:
        assert reader.step_line() == reference.step_line()
        assert reader.heartbeat() == len(script)
    tokens = RingReader(memory, CAPACITY)
    tokens._move(max(0, len(reference.records) - CAPACITY))
    assert records_of(tokens.poll()) == reference.records[-CAPACITY:]


@many
@given(st.lists(steps(), max_size=6), st.sampled_from([1, 2, 3, 32, 256]), st.integers(0, 2**64 - 1), st.booleans())
def test_the_kernels_do_what_the_model_does(
    host_library: Path, script: list[Any], block: int, seed: int, wide: bool
) -> None:
    page, memory = new_memory(SLOTS, CAPACITY)
    meter, reference = CompiledMeter(host_library, page, memory, CAPACITY, block=block), Reference(SLOTS)
    meter.library.evap_seed(ctypes.c_uint64(seed))
    drive(meter, reference, script, wide=wide)
    check(page, memory, reference, script)


@many
@given(st.lists(steps(), max_size=6))
def test_numpy_does_the_same(script: list[Any]) -> None:
    page, memory = new_memory(SLOTS, CAPACITY)
    reference = Reference(SLOTS)
    drive(NumpyMeter(page, memory, CAPACITY), reference, script)
    check(page, memory, reference, script)


@many
@given(st.lists(steps(), max_size=6))
def test_numpy_and_the_kernels_leave_the_same_bytes(host_library: Path, script: list[Any]) -> None:
    left = []
    for meter in (NumpyMeter, lambda *memory: CompiledMeter(host_library, *memory)):
        page, memory = new_memory(SLOTS, CAPACITY)
        drive(meter(page, memory, CAPACITY), Reference(SLOTS), script)
        left.append((page, memory))
    assert left[0] == left[1]


def test_more_rows_than_threads_and_a_full_table(host_library: Path) -> None:
    slots, capacity = 1024, 4096
    page, memory = new_memory(slots, capacity)
    meter, reference = CompiledMeter(host_library, page, memory, capacity, block=256), Reference(slots)
    both: tuple[Any, Any] = (meter, reference)
    rng = np.random.default_rng(1)
    entries = [Join(s, s, 10 + s, 0, 1 + s % 9, -1) for s in range(slots)]
    for step in range(3):
        order = rng.permutation(slots).astype(np.int32)
        tokens = rng.integers(0, 50_000, (slots, 4), dtype=np.int32)
        counts = rng.integers(0, 5, slots, dtype=np.int32)
        for one in both:
            one.begin(entries if step == 0 else [], EPOCH_NS)
            one.step(order, tokens, counts, EPOCH_NS + step * 1000)
    reader = PageReader(page)
    assert all(reader.row(s) == reference.accounts[s].row() for s in range(slots))
    assert reader.step_line() == reference.step_line()


def test_a_ring_that_one_step_could_lap_is_refused(host_library: Path) -> None:
    page, memory = new_memory(SLOTS, 4)
    for meter in (CompiledMeter(host_library, page, memory, 4), NumpyMeter(page, memory, 4)):
        meter.begin([Join(0, 1, 5)], EPOCH_NS)
        with pytest.raises(ValueError, match="do not fit"):
            meter.step(int32([0, 1], (2,)), int32([1] * 6, (2, 3)), None, EPOCH_NS)
        meter.step(int32([0, 1], (2,)), int32([1] * 6, (2, 3)), None, EPOCH_NS, ring=False)


def test_render_rows_writes_the_text_field(host_library: Path) -> None:
    library = ctypes.CDLL(str(host_library))
    width, stride, offset = 24, 100, 40
    rng = np.random.default_rng(2)
    fragments = rng.integers(0, 256, (50, width), dtype=np.uint8)
    tokens, places = rng.integers(0, 50, 9, dtype=np.int32), rng.permutation(12)[:9].astype(np.int32)
    expected = rng.integers(0, 256, (12, stride), dtype=np.uint8)
    buffer = expected.copy()
    expected[places, offset : offset + width] = fragments[tokens]
    library.evap_render_rows(
        8, 9, *(ctypes.c_void_p(a.ctypes.data) for a in (tokens, places, fragments)), width,
        ctypes.c_void_p(buffer.ctypes.data), stride, offset,
    )  # fmt: skip
    assert (buffer == expected).all()
