"""The parent's part in accounts: what it opens, and what it does for a process that died."""

from __future__ import annotations

import mmap
import sqlite3
from pathlib import Path

import msgspec
import pytest

from evap.books import Books, lost
from evap.config import MeterConfig
from evap.errors import Conflict, QuotaExceeded, StartupError
from evap.metering import keys, ledger, opened, recovery, survivors
from evap.metering.accounts import Account, Ticket
from evap.metering.shared_accounts import SharedAccounts
from evap.metering.shared_operations import SharedOperations
from evap.turns import Turns
from tests.metering.test_recovery import record

WALL_NS = 1_700_000_000 * 10**9


def books(config: MeterConfig) -> Books:
    it = Books(config, 2, now_ns=lambda: 0, wall_ns=lambda: WALL_NS)
    it.open()
    return it


def test_a_dead_process_is_buried(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys.create(path, "alice", {"tokens_per_day": 100})
    data = tmp_path / "data"
    it = books(MeterConfig(data_dir=str(data), api_keys=str(path)))
    accounts = SharedAccounts(it.accounts_fd, rows=it.rows, processes=2, process=1)
    operations = SharedOperations(it.operations_fd, 1)
    account = Account(keys.read(path).keys["alice"], now_ns=0, wall_s=WALL_NS // 10**9)
    accounts.enter(account)
    ticket = Ticket(account)
    accounts.admit(account, 0, WALL_NS // 10**9)
    accounts.reserve(ticket, prompt=0, n=1, asked=100, room=100, now_ns=0, wall_s=WALL_NS // 10**9)
    for name in ("op", "unheard"):
        operations.begin("alice", name, f"id-{name}")
    table = opened.OpenTable(recovery.files(data, 1).table, 4, 8)
    table.open(survivors.note(("id-op", "alice", "op", "m", WALL_NS // 1000, 10, 1)), (2,), whole=False)
    table.computed[2] = 30
    table.release()

    [left] = it.bury(1)

    assert (left.id, left.computed, left.end) == ("id-op", 30, "interrupted")
    with ledger.reading(data) as db:
        assert ledger.find(db, "id-op") == left
    with pytest.raises(Conflict, match="complete"):
        operations.begin("alice", "op", "again")  # it had delivered something
    operations.begin("alice", "unheard", "again")
    accounts.admit(account, 0, WALL_NS // 10**9)
    assert account.day.left == 100 - 40
    assert it.bury(1) == []
    total = lost([left])
    assert total.values["evap_exchanges"] == {"interrupted": 1.0}
    assert total.values["evap_tokens"]["computed"] == 30
    accounts.close()
    operations.close()
    it.close()


def test_places_of_a_dead_process_are_free_while_the_ledger_is_locked(tmp_path: Path) -> None:
    it = books(MeterConfig(data_dir=str(tmp_path)))
    memory = memoryview(mmap.mmap(it.turns_fd, Turns.size(2)))
    dead, other = (Turns(memory, process=number, processes=2) for number in (0, 1))
    dead.hold(7)
    assert other.held_elsewhere() == 7
    locker = sqlite3.connect(tmp_path / ledger.FILE, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    table = opened.OpenTable(recovery.files(tmp_path, 0).table, 4, 8)
    table.open(survivors.note(("id", "", "", "m", WALL_NS // 1000, 10, 1)), (2,), whole=False)
    table.release()
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        it.bury(0)
    assert other.held_elsewhere() == 0
    locker.execute("ROLLBACK")
    locker.close()
    assert [record.id for record in it.bury(0)] == ["id"]
    it.close()


def test_what_was_used_before_counts_and_the_directory_is_ours(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys.create(path, "alice", {"tokens_per_day": 10})
    config = MeterConfig(data_dir=str(tmp_path / "data"), api_keys=str(path))
    first = books(config)
    with pytest.raises(StartupError, match="another server uses"):
        books(config)
    db = ledger.open_ledger(tmp_path / "data")
    ledger.insert(db, [msgspec.structs.replace(record("a", prompt=6, billable=5), opened_us=WALL_NS // 1000)])
    db.close()
    first.close()
    again = books(config)
    accounts = SharedAccounts(again.accounts_fd, rows=again.rows, processes=2, process=0)
    account = Account(keys.read(path).keys["alice"], now_ns=0, wall_s=WALL_NS // 10**9)
    accounts.enter(account)
    with pytest.raises(QuotaExceeded):
        accounts.admit(account, 0, WALL_NS // 10**9)
    accounts.close()
    again.close()


def test_without_a_directory_there_is_no_ledger_and_no_sink() -> None:
    it = books(MeterConfig())
    assert it.bury(0) == []
    assert it.snapshot().values == {}
    it.close()
    with pytest.raises(StartupError, match="--usage-sink"):
        books(MeterConfig(usage_sink="postgresql://nowhere/x"))
