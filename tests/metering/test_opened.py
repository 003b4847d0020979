"""The table of open exchanges against a model: after any step a reader of the file finds the true counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evap.metering.opened import ENTRY_BYTES, MAX_NOTE_BYTES, USED_UP, OpenTable, Survivor, recover
from evap.metering.record import Record
from tests.metering.rows import record

SLOTS = 6


class Life(RuleBasedStateMachine):
    """Exchanges of one to three slots that run, end one by one, and are settled."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(self.folder) / "open"
        self.table = OpenTable(self.path, SLOTS, 8)
        self.free = list(range(SLOTS))
        #: entry -> note, whole, running slots {slot: [computed, lag, cached]}, counts of released ones
        self.model: dict[int, tuple[bytes, bool, dict[int, list[int]], list[int]]] = {}
        self.number = 0
        self.settled: set[int] = set()

    folder = ""

    @precondition(lambda self: self.free and len(self.model) + len(self.settled) < 8)
    @rule(n=st.integers(1, 3), whole=st.booleans())
    def start(self, n: int, whole: bool) -> None:
        slots = [self.free.pop(0) for _ in range(min(n, len(self.free)))]
        for slot in slots:
            self.table.computed[slot] = 0
        self.number += 1
        note = b"exchange %d" % self.number
        entry = self.table.open(note, slots, whole=whole)
        assert entry >= 0
        self.model[entry] = (note, whole, {slot: [0, 0, 0] for slot in slots}, [0, 0, 0, 0])

    @rule(data=st.data(), computed=st.integers(1, 9), lag=st.integers(0, 5), cached=st.integers(0, 3))
    def count(self, data: st.DataObject, computed: int, lag: int, cached: int) -> None:
        running = [(entry, slot) for entry, (_, _, slots, _) in self.model.items() for slot in slots]
        if not running:
            return
        entry, slot = data.draw(st.sampled_from(running))
        counts = self.model[entry][2][slot]
        counts[:] = [counts[0] + computed, min(lag, counts[0] + computed), max(cached, counts[2])]
        self.table.computed[slot], self.table.lag[slot], self.table.cached[slot] = counts

    @rule(data=st.data(), out=st.integers(0, 3))
    def release(self, data: st.DataObject, out: int) -> None:
        running = [(entry, slot) for entry, (_, _, slots, _) in self.model.items() for slot in slots]
        if not running:
            return
        entry, slot = data.draw(st.sampled_from(running))
        computed, _, cached = self.model[entry][2].pop(slot)
        base = self.model[entry][3]
        base[:] = [base[0] + computed, base[1] + computed, base[2] + min(out, computed), max(base[3], cached)]
        self.table.released(entry, slot, computed, computed, min(out, computed))
        self.free.append(slot)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if not self.model:
            return
        entry = data.draw(st.sampled_from(sorted(self.model)))
        self.free += self.model.pop(entry)[2]
        self.table.settle(
            [entry],
            [record(
                first_us=1, last_us=2, settled_us=3, cached=4, computed=9, emitted=8, delivered=7, billable=6, steps=5,
                operation="used",
            )],
        )  # fmt: skip
        self.settled.add(entry)

    @precondition(lambda self: self.settled)
    @rule(data=st.data())
    def durable(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted(self.settled)))
        self.settled.remove(entry)
        self.table.free([entry])

    @invariant()
    def a_successor_finds_the_counts(self) -> None:
        expected = []
        for note, whole, slots, base in self.model.values():
            computed = sum(c[0] for c in slots.values())
            lag = sum(c[1] for c in slots.values())
            cached = max([base[3], *(c[2] for c in slots.values())])
            out = base[2] + (0 if whole else computed - lag)
            expected.append(Survivor(note, cached, base[0] + computed, base[1] + computed, out))
        found = recover(self.path)
        assert sorted(s for s in found if s.final is None) == sorted(expected)
        final = Record("", "", USED_UP, "", 0, 1, 2, 3, 0, 4, 9, 8, 7, 6, 5, 0, 200, "stop")
        assert [s.final for s in found if s.final is not None] == [final] * len(self.settled)
        assert self.table.crowded == (len(self.model) + len(self.settled) > 4)


def test_any_life(tmp_path: Path) -> None:
    Life.folder = str(tmp_path)
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Life, settings=settings(max_examples=60, stateful_step_count=30))


def test_death_between_two_stores_counts_once(tmp_path: Path) -> None:
    """`released` writes the exchange's counts first and lets go of the slot then."""
    table = OpenTable(tmp_path / "open", 2, 2)
    entry = table.open(b"note", [1], whole=False)
    table.computed[1] = 5
    table.released(entry, 1, 5, 5, 5)
    table.owner[1] = entry  # as it was in between
    assert recover(tmp_path / "open") == [Survivor(b"note", 0, 5, 5, 5)]


def test_a_full_table_says_so(tmp_path: Path) -> None:
    table = OpenTable(tmp_path / "open", 4, 1)
    assert not table.full
    assert table.open(b"", [0], whole=True) == 0
    assert table.full
    assert table.open(b"", [1], whole=True) == -1
    table.settle([0], [record(end="x" * 100)])
    assert table.full, "until it is durable"
    (survivor,) = recover(tmp_path / "open")
    assert survivor.final is not None
    assert survivor.final.end == "x" * 32
    table.free([0])
    assert table.open(b"x" * (MAX_NOTE_BYTES + 1), [1], whole=True) == -1
    assert table.open(b"x" * MAX_NOTE_BYTES, [1], whole=True) == 0


def test_slow_readers_go_on_being_counted(tmp_path: Path) -> None:
    table = OpenTable(tmp_path / "open", 1, 1)
    entry = table.open(b"n", [0], whole=False)
    table.released(entry, 0, 9, 8, 2)
    table.delivered(entry, 7)
    assert recover(tmp_path / "open") == [Survivor(b"n", 0, 9, 8, 7)]


@pytest.mark.parametrize("data", [b"", b"x" * 200, b"EVAPOPN1" + b"\xff" * 100])
def test_what_is_no_table_holds_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "open").write_bytes(data)
    assert recover(tmp_path / "open") == []
    assert recover(tmp_path / "absent") == []
    assert ENTRY_BYTES % 64 == 0
