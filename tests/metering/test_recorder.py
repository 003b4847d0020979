"""The recorder's thread: groups, a locked file, a full disk, a spool, and nothing lost in any order of these."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from evap.metering import ledger, recorder
from evap.metering.opened import OpenTable, recover
from evap.metering.record import Record, encode
from evap.metering.recorder import Recorder, State, read_spool
from tests.clients.asking import eventually
from tests.metering.rows import record
from tests.support import TIME_FACTOR

WAIT_S = 20.0 * TIME_FACTOR


class Desk:
    """A recorder in a folder, its states as they were entered, and waiting for one of them."""

    def __init__(self, folder: Path, entries: int = 256) -> None:
        self.folder = folder
        self.db = ledger.open_ledger(folder)
        self.db.execute("PRAGMA busy_timeout = 10")
        self.table = OpenTable(folder / "open", 1, entries)
        self.states: list[State] = []
        self._changed = threading.Condition()
        self.recorder = Recorder(
            self.db, self.table, folder / "spool", on_state=self._entered, now_ns=lambda: self.now_ns
        )
        self.count = 0
        self.now_ns = 1

    def _entered(self, state: State, detail: str) -> None:
        with self._changed:
            self.states.append(state)
            self._changed.notify_all()

    def wait(self, state: State) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.states) and self.states[-1] is state, WAIT_S), self.states

    def put(self, count: int) -> None:
        for _ in range(count):
            self.count += 1
            entry = self.table.open(b"", [], whole=True)
            made = record(f"r{self.count}")
            self.table.settle([entry], [made])
            self.recorder.put([made], [entry])

    def ledger_rows(self) -> int:
        with ledger.reading(self.folder) as db:
            return ledger.sums(db, ledger.Filter(), ())[0].exchanges


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(recorder, "RETRY_S", 0.02)
    it = Desk(tmp_path)
    it.recorder.start()
    yield it
    it.recorder.close()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Another process holds the ledger's write lock."""
    other = sqlite3.connect(folder / ledger.FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.execute("ROLLBACK")
    other.close()


def test_what_is_put_is_durable_soon(desk: Desk) -> None:
    desk.put(300)
    assert desk.recorder.flush(WAIT_S)
    assert desk.ledger_rows() == 300 == desk.recorder.durable
    assert recover(desk.folder / "open") == []
    desk.put(1)
    assert desk.recorder.flush(WAIT_S)
    assert desk.ledger_rows() == 301


def test_what_comes_during_a_commit_waits_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path)
    groups: list[int] = []

    def insert(db: sqlite3.Connection, records: Sequence[Record]) -> None:
        ledger.insert(db, records)
        groups.append(len(records))
        desk.put(2)

    monkeypatch.setattr(recorder, "ledger", SimpleNamespace(insert=insert))
    desk.put(3)
    desk.recorder._work()
    assert groups == [3]
    assert desk.recorder.pending == 2
    desk.recorder._work()
    assert groups == [3, 2]
    assert desk.ledger_rows() == 5 == desk.recorder.durable


def test_more_than_one_transaction_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole puts, oldest first, each entry free once its record is there."""
    monkeypatch.setattr(recorder, "MAX_GROUP", 10)
    desk = Desk(tmp_path)
    desk.put(25)
    made = [record(f"group{number}") for number in range(12)]
    desk.recorder.put(made, [-1] * len(made))
    records, entries, batches = desk.recorder._group()
    assert ([r.id for r in records], batches) == ([f"r{number}" for number in range(1, 11)], 10)
    assert len(set(entries)) == 10
    desk.recorder._work()
    assert (desk.recorder.pending, desk.ledger_rows()) == (0, 37)
    assert recover(tmp_path / "open") == []


def test_close_writes_what_is_waiting(desk: Desk) -> None:
    desk.put(50)
    assert desk.recorder.close()
    assert desk.ledger_rows() == 50


def test_a_locked_ledger_costs_nothing_but_time(desk: Desk) -> None:
    with locked(desk.folder):
        desk.put(20)
        desk.wait(State.SPOOLING)
        assert desk.recorder.accepting
        assert desk.recorder.pending == 20
        assert len(recover(desk.folder / "open")) == 20, "a kill now loses nothing"
        assert "locked" in desk.recorder.detail
    desk.wait(State.OK)
    assert desk.recorder.flush(WAIT_S)
    assert desk.ledger_rows() == 20


def test_a_commit_that_hangs_is_trouble(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither done nor failed: as when the disk hangs, or the process that has the turn is stopped."""
    began, go_on = threading.Event(), threading.Event()

    def insert(db: sqlite3.Connection, records: Sequence[Record]) -> None:
        began.set()
        assert go_on.wait(WAIT_S)

    monkeypatch.setattr(recorder, "ledger", SimpleNamespace(insert=insert))
    desk.put(1)
    assert began.wait(WAIT_S)
    assert desk.recorder.trouble == ""
    desk.now_ns += recorder.STUCK_NS + 1
    assert desk.recorder.trouble == "stuck: it has not been written to for 5 s"
    go_on.set()
    assert desk.recorder.flush(WAIT_S)
    eventually(lambda: desk.recorder.trouble == "", "it is written again")


def test_a_long_outage_goes_to_the_spool_file(desk: Desk) -> None:
    with locked(desk.folder):
        desk.put(150)  # more than half of the table
        desk.wait(State.SPOOLING)
        assert desk.recorder.flush(WAIT_S)
        assert len(read_spool(desk.folder / "spool")) == 150
        assert desk.recorder.spooled > 0
        assert recover(desk.folder / "open") == []
        desk.put(10)
    desk.wait(State.OK)
    assert desk.recorder.flush(WAIT_S)
    assert desk.ledger_rows() == 160
    assert not (desk.folder / "spool").exists()
    assert desk.recorder.spooled == 0


def test_a_full_disk(desk: Desk) -> None:
    desk.put(5)
    assert desk.recorder.flush(WAIT_S)
    pages = desk.db.execute("PRAGMA page_count").fetchone()[0]
    desk.db.execute(f"PRAGMA max_page_count = {pages}")
    desk.put(100)
    desk.wait(State.SPOOLING)
    assert "full" in desk.recorder.detail
    desk.db.execute("PRAGMA max_page_count = 1000000")
    desk.wait(State.OK)
    assert desk.recorder.flush(WAIT_S)
    assert desk.ledger_rows() == 105


def test_when_nothing_can_be_written_nothing_new_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "RETRY_S", 0.02)
    desk = Desk(tmp_path, entries=40)
    (tmp_path / "spool").mkdir()  # cannot be opened for appending
    desk.recorder.spooled = 0
    desk.recorder.start()
    with locked(tmp_path):
        desk.put(60)
        desk.wait(State.FULL)
        assert not desk.recorder.accepting
        assert "spool" in desk.recorder.detail
        desk.put(5)  # those that run are not lost either
    desk.wait(State.OK)
    assert desk.recorder.flush(WAIT_S)
    assert desk.ledger_rows() == 65
    assert desk.recorder.close()


def test_an_outage_until_the_end_is_left_to_the_next_start(desk: Desk) -> None:
    with locked(desk.folder):
        desk.put(7)
        desk.wait(State.SPOOLING)
        assert desk.recorder.close()
        assert len(read_spool(desk.folder / "spool")) == 7


def test_half_a_line_is_no_record(tmp_path: Path) -> None:
    assert read_spool(tmp_path / "absent") == []
    whole = encode(record("a")) + b"\n" + encode(record("b")) + b"\n"
    (tmp_path / "spool").write_bytes(whole + encode(record("c"))[:50])
    assert read_spool(tmp_path / "spool") == [record("a"), record("b")]


def test_a_spool_that_could_not_take_it_all_is_cut_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    whole: Callable[[int, bytes], int] = os.write
    monkeypatch.setattr("evap.metering.recorder.os.write", lambda fd, data: whole(fd, bytes(data[:10])))
    with pytest.raises(OSError, match="full"):
        desk.recorder._append_spool(b'["a","b","c"]\n')
    assert (desk.folder / "spool").read_bytes() == b""
