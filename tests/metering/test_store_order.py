"""kernels.cu under the model of store order (cuda_shim.h): a reader looks after every store that becomes visible.

What it must never see: a torn or stale row, a record that was not sampled. Broken variants must be seen to break.
"""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.metering import layout, page
from evap.metering.page import PageReader, Row
from evap.metering.writer import CompiledMeter, Join
from evap.ring import RECORD_WORDS, WORD_RECORDS, RingReader, tag_of
from tests.metering.reference import RECORD, Reference, new_memory, records_of
from tests.metering.test_kernels import CAPACITY, SLOTS, drive, many, steps


class History:
    """A meter that runs the reference and notes every row there ever was: (step it belongs to, row), per slot.

    A row that `begin` of step n makes belongs to n - 0.5: it may be seen before the step line says n.
    """

    def __init__(self) -> None:
        self.reference = Reference(SLOTS)
        self.rows: dict[int, list[tuple[float, Row]]] = {s: [] for s in range(SLOTS)}

    def begin(self, joins: list[Join], now_ns: int) -> None:
        self.reference.begin(joins, now_ns)
        self._note(self.reference.step_count + 0.5)

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.reference.step(*args, **kwargs)
        self._note(self.reference.step_count)

    def _note(self, when: float) -> None:
        for slot, account in self.reference.accounts.items():
            self.rows[slot].append((when, account.row()))

    def allowed(self, slot: int, step: int) -> list[Row | None]:
        """The row as of `step`, and every later one. None: not written yet."""
        versions: list[tuple[float, Row | None]] = [(-1.0, None), *self.rows[slot]]
        last = max(i for i, (when, _) in enumerate(versions) if when <= step)
        return [row for _, row in versions[last:]]


class Watcher:
    """Reads page and ring and notes what is wrong. rows_by_tag False, ring_by_tag False: a reader without tags."""

    def __init__(self, memory: Any, ring: Any, history: History, rows_by_tag: bool, ring_by_tag: bool) -> None:
        self.reader, self.history = PageReader(memory), history
        self.words = np.frombuffer(memory, "<u8")
        self.ring, self.tokens = np.frombuffer(ring, "<u8"), RingReader(ring, CAPACITY)
        self.rows_by_tag, self.ring_by_tag = rows_by_tag, ring_by_tag
        self.position = 0
        self.records: list[RECORD] = []
        self.wrong: list[str] = []

    def look(self) -> None:
        try:
            self._look_at_rows()
            self.records += records_of(self.tokens.poll()) if self.ring_by_tag else self._careless_poll()
        except Exception as e:  # noqa: BLE001  (nothing may leave a ctypes callback)
            self.wrong.append(repr(e))

    def _look_at_rows(self) -> None:
        step = self.reader.heartbeat()
        for slot in range(SLOTS):
            at = layout.WORD_ROWS + slot * layout.LINE_WORDS
            words = [int(w) for w in self.words[at : at + layout.LINE_WORDS]]
            row = self.reader.row(slot)
            if not self.rows_by_tag and any(words):
                state, *rest = (w & layout.VALUE_MASK for w in words)
                row = Row(state & 0xFFFF, state >> 16, *rest)
            allowed = self.history.allowed(slot, step)
            if row is None and None not in allowed and all(words):
                continue  # it was there and is being written again
            if row not in allowed:
                self.wrong.append(f"step {step}, slot {slot}: {row}, not one of {allowed}")

    def _careless_poll(self) -> list[RECORD]:
        """Records found by the tag of their first word only."""
        found: list[RECORD] = []
        while True:
            at = WORD_RECORDS + self.position % CAPACITY * RECORD_WORDS
            who, token, index, last = (int(w) for w in self.ring[at : at + RECORD_WORDS])
            if who >> 32 != tag_of(self.position):
                return found
            signed = (token & 0xFFFF_FFFF) - ((token & 0x8000_0000) << 1)
            found.append((who & 0xFFFF, who >> 16 & 0xFFFF, signed, index & 0xFFFF_FFFF, last & 0xFF))
            self.position += 1


def watch(
    library: Path,
    script: list[Any],
    block: int,
    seed: int,
    eagerness: int,
    *,
    rows_by_tag: bool = True,
    ring_by_tag: bool = True,
    fences: bool = True,
) -> list[str]:
    """Everything wrong that a reader sees while the kernels run `script`."""
    history = History()
    drive(history, Reference(SLOTS), script)
    memory, ring = new_memory(SLOTS, CAPACITY)
    watcher = Watcher(memory, ring, history, rows_by_tag, ring_by_tag)
    observer = ctypes.CFUNCTYPE(None)(watcher.look)
    meter = CompiledMeter(library, memory, ring, CAPACITY, block=block)
    meter.library.evap_seed(ctypes.c_uint64(seed))
    meter.library.evap_model(1, eagerness, observer, not fences)
    try:
        drive(meter, Reference(SLOTS), script)
        meter.library.evap_model_drain()
    finally:
        meter.library.evap_model(0, 0, None, 0)
    watcher.look()
    sampled = history.reference.records
    if ring_by_tag and len(watcher.records) + watcher.tokens.lost != len(sampled):
        watcher.wrong.append("seen + lost != produced")
    if not watcher.tokens.lost and watcher.records != sampled[: len(watcher.records)]:
        watcher.wrong.append("the ring gave records that were not sampled")
    return watcher.wrong


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes between two looks here."""
    monkeypatch.setattr(page, "_LOOKS", 1)


@many
@given(st.lists(steps(), max_size=4), st.sampled_from([1, 2, 8]), st.integers(0, 2**32), st.sampled_from([0, 20, 80]))
def test_no_order_of_stores_shows_anything_wrong(
    host_library: Path, script: list[Any], block: int, seed: int, eagerness: int
) -> None:
    assert watch(host_library, script, block, seed, eagerness) == []


def script_of(count: int) -> list[Any]:
    """A busy, plain script: three slots, all in every step, no end."""
    first = [Join(s, 100 + s, 5, 0, 1000, -1) for s in range(3)]
    return [(first if n == 0 else [], [0, 1, 2], [[n, n + 1]] * 3, [2, 1, 2], 2, 1000, True) for n in range(count)]


def sightings(library: Path, **readers: bool) -> int:
    """Runs of twenty in which something wrong was seen."""
    return sum(bool(watch(library, script_of(4), 4, seed, 20, **readers)) for seed in range(20))


def test_the_model_sees_nothing_in_the_real_kernels(host_library: Path) -> None:
    assert sightings(host_library) == 0


def test_without_the_fence_a_step_is_seen_before_its_rows(host_library: Path) -> None:
    assert sightings(host_library, fences=False) > 5


def test_without_tags_rows_are_read_torn(host_library: Path) -> None:
    assert sightings(host_library, rows_by_tag=False) > 5


def test_with_a_tag_in_one_word_only_records_are_read_half_written(host_library: Path) -> None:
    assert sightings(host_library, ring_by_tag=False) > 5


def test_a_run_can_be_repeated(host_library: Path) -> None:
    for seed in range(3):
        first, second = (watch(host_library, script_of(3), 4, seed, 20, rows_by_tag=False) for _ in range(2))
        assert first == second
        assert first
    runs = {
        tuple(watch(host_library, script_of(3), 4, s, 20, rows_by_tag=False)) for s in itertools.islice(range(9), 6)
    }
    assert len(runs) > 1
