"""Files of processes that were killed: each exchange into the ledger once, whoever had it."""

from __future__ import annotations

from pathlib import Path

from evap.metering import ledger, opened, recovery, survivors
from evap.metering.record import Record, encode


def record(id: str, key: str = "alice", end: str = "length", **counts: int) -> Record:
    numbers = {"prompt": 3, "cached": 0, "computed": 5, "emitted": 5, "delivered": 5, "billable": 5} | counts
    return Record(
        id=id, key=key, operation="", model="m", opened_us=1, first_us=2, last_us=3, settled_us=4, steps=1, choices=1,
        status=200, end=end, **numbers,
    )  # fmt: skip


def left(place: recovery.Files, id: str, tokens: int) -> None:
    """An exchange that was open in a process with so many tokens."""
    table = opened.OpenTable(place.table, 4, 8)
    table.open(survivors.note((id, "alice", "", "m", 1, 3, 1)), (2,), whole=False)
    table.computed[2] = tokens
    table.release()


def test_names() -> None:
    folder = Path("/data")
    assert recovery.files(folder) == (folder / "open", folder / "spool.jsonl", "counters-")
    assert recovery.files(folder, 3) == (folder / "open.3", folder / "spool.3.jsonl", "counters.3-")


def test_all_processes_that_there_ever_were(tmp_path: Path) -> None:
    left(recovery.files(tmp_path), "a", 2)
    left(recovery.files(tmp_path, 0), "b", 3)
    left(recovery.files(tmp_path, 11), "c", 4)
    recovery.files(tmp_path, 5).spool.write_bytes(encode(record("d")) + b"\n" + encode(record("e"))[:-4])
    (tmp_path / "open.backup").write_text("not ours")
    db = ledger.open_ledger(tmp_path)
    found = recovery.recover(db, tmp_path, recovery.all_files(tmp_path), policy="delivered", wall_ns=10**18)
    assert {r.id: (r.computed, r.end) for r in found} == {
        "a": (2, "interrupted"), "b": (3, "interrupted"), "c": (4, "interrupted"), "d": (5, "length"),
    }  # fmt: skip
    assert [r.id for r in recovery.interrupted(found)] == ["a", "b", "c"]
    assert {r.id for _, r in ledger.rows(db, ledger.Filter())} == set("abcd")
    assert sorted(p.name for p in tmp_path.glob("open*")) == ["open.backup"]
    assert recovery.recover(db, tmp_path, recovery.all_files(tmp_path), policy="delivered", wall_ns=10**18) == []
    db.close()


def test_what_counts_towards_budgets() -> None:
    rows = [record("a"), record("b"), record("c", key="bob", computed=0, billable=0)]
    assert recovery.tokens_by_key(rows) == {"alice": 16, "bob": 0}
