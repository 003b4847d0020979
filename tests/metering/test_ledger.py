"""The ledger: once is once, sums are exact, and a file that cannot be trusted is refused."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.errors import StartupError
from evap.metering import ledger
from evap.metering.ledger import Filter
from evap.metering.record import Record
from tests.metering.rows import DAY_US, record


def fill(folder: Path, *records: Record) -> sqlite3.Connection:
    db = ledger.open_ledger(folder)
    ledger.insert(db, records)
    return db


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    odd = record("x", operation="a\"b'c,d", model="org/модель", end="client_abort", opened_us=(1 << 53) + 1)
    db = fill(tmp_path, odd)
    assert ledger.find(db, "x") == odd
    assert ledger.find(db, "y") is None
    assert ledger.find_operation(db, "alice", "a\"b'c,d") == "x"
    assert ledger.find_operation(db, "bob", "a\"b'c,d") is None
    assert ledger.find_operation(db, "alice", "") is None


records = st.builds(
    record, st.sampled_from([f"id-{i}" for i in range(12)]), key=st.sampled_from(["", "alice", "bob"]),
    model=st.sampled_from(["m", "n"]), opened_us=st.integers(0, 3).map(lambda d: (20_000 + d) * DAY_US + 17),
    prompt=st.integers(0, 50), computed=st.integers(0, 50), billable=st.integers(0, 50),
)  # fmt: skip


@settings(max_examples=40)
@given(st.lists(st.lists(records, max_size=8), max_size=5))
def test_sums_are_those_of_what_came_first(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[Record]]
) -> None:
    db = ledger.open_ledger(tmp_path_factory.mktemp("ledger"))
    kept: dict[str, Record] = {}
    for group in groups:
        ledger.insert(db, group)
        for r in group:
            kept.setdefault(r.id, r)
    expected: Counter[tuple[int, str, str]] = Counter()
    paid: Counter[tuple[int, str, str]] = Counter()
    for r in kept.values():
        expected[r.opened_us // DAY_US, r.model, r.key] += r.billable
        paid[r.opened_us // DAY_US, r.model, r.key] += r.prompt if r.computed else 0
    found = ledger.sums(db, Filter(), ("key", "day", "model"))
    assert {(u.day, u.model, u.key): u.billable for u in found} == dict(expected)
    assert {(u.day, u.model, u.key): u.paid_prompt for u in found} == dict(paid)
    assert sum(u.exchanges for u in found) == len(kept) == len(ledger.rows(db, Filter()))
    total = ledger.sums(db, Filter(), ())[0]
    assert total.billable == sum(r.billable for r in kept.values())
    assert sum(ledger.charged_since(db, 0).values()) == total.billable + total.paid_prompt
    db.close()


def test_filters_and_pages(tmp_path: Path) -> None:
    db = fill(tmp_path, *(record(f"r{i}", key="ab"[i % 2], opened_us=(20_000 + i) * DAY_US) for i in range(10)))
    assert [r.id for _, r in ledger.rows(db, Filter(key="b"))] == ["r1", "r3", "r5", "r7", "r9"]
    assert [r.id for _, r in ledger.rows(db, Filter(first_day=20_002, last_day=20_004))] == ["r2", "r3", "r4"]
    assert ledger.sums(db, Filter(first_day=20_002, last_day=20_004, key="a"), ("key",))[0].exchanges == 2
    page = ledger.rows(db, Filter(), limit=4)
    assert [r.id for _, r in ledger.rows(db, Filter(), after=page[-1][0], limit=4)] == ["r4", "r5", "r6", "r7"]
    assert ledger.charged_since(db, 20_008) == {"a": 30, "b": 30}


def test_it_opens_again_and_keeps_its_name(tmp_path: Path) -> None:
    db = fill(tmp_path, record("a", operation="op"))
    name = ledger.node(db)
    db.close()
    again = ledger.open_ledger(tmp_path)
    assert ledger.node(again) == name
    assert ledger.last_operations(again, 10) == [("alice", "op", "a")]
    assert again.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    with ledger.reading(tmp_path) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM exchanges")


def test_every_version_is_migrated(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / ledger.FILE, isolation_level=None)
    db.execute("PRAGMA user_version = 0")  # what an empty file has
    db.close()
    assert ledger.open_ledger(tmp_path).execute("PRAGMA user_version").fetchone() == (len(ledger.MIGRATIONS),)


def test_a_newer_ledger_is_left_alone(tmp_path: Path) -> None:
    ledger.open_ledger(tmp_path).execute("PRAGMA user_version = 99")
    with pytest.raises(StartupError, match="newer evap"):
        ledger.open_ledger(tmp_path)


@pytest.mark.parametrize("at", [0, 4096 * 2 + 10])
def test_damage_is_found_at_the_start(tmp_path: Path, at: int) -> None:
    db = fill(tmp_path, *(record(f"r{i}") for i in range(500)))
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    path = tmp_path / ledger.FILE
    data = bytearray(path.read_bytes())
    data[at : at + 2000] = b"\xaa" * 2000
    path.write_bytes(data)
    with pytest.raises(StartupError, match=r"ledger .*(damaged|cannot be used)") as error:
        ledger.open_ledger(tmp_path)
    assert error.value.remedy


def test_no_ledger_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="there is no ledger"), ledger.reading(tmp_path):
        pass
