"""The ledger: one SQLite file, one row for each exchange, kept once whatever is tried twice.

WAL with synchronous=FULL: a commit is on disk when it returns. Rows are written by one connection (`recorder.py`), many
at a time, in statements of up to 256 rows: each is one call, so a busy loop on another thread hands over the GIL a few
times for a group and not once for each row. A trigger keeps sums by day, model and key, in the same commit.
"""

from __future__ import annotations

import contextlib
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from evap.errors import StartupError
from evap.metering.record import COLUMNS, Record

FILE: Final = "ledger.sqlite3"
DAY_US: Final = 86_400_000_000
#: Of `days`: sums over exchanges. paid_*: of those whose engine gave any token.
SUMS: Final = (
    "exchanges", "prompt", "cached", "computed", "emitted", "delivered", "billable", "paid_prompt", "paid_cached",
)  # fmt: skip
GROUPS: Final = ("day", "model", "key")
MAX_ROWS: Final = 1000

_TEXT: Final = frozenset(("id", "key", "operation", "model", "end"))
_TYPED: Final = ", ".join(f"{c} {'TEXT' if c in _TEXT else 'INTEGER'} NOT NULL" for c in COLUMNS)
_SUMMED: Final = ", ".join(f"{s} INTEGER NOT NULL" for s in SUMS)
_ADDED: Final = ", ".join(f"{s} = {s} + excluded.{s}" for s in SUMS)

#: Script n brings a ledger of version n to version n + 1.
MIGRATIONS: Final = (
    f"""
    CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE exchanges (seq INTEGER PRIMARY KEY AUTOINCREMENT, {_TYPED}) STRICT;
    CREATE UNIQUE INDEX exchanges_id ON exchanges (id);
    CREATE INDEX exchanges_key ON exchanges (key);
    CREATE INDEX exchanges_operation ON exchanges (key, operation) WHERE operation <> '';
    CREATE TABLE days (day INTEGER NOT NULL, model TEXT NOT NULL, key TEXT NOT NULL, {_SUMMED},
        PRIMARY KEY (day, model, key)) STRICT, WITHOUT ROWID;
    CREATE TRIGGER exchanges_days AFTER INSERT ON exchanges BEGIN
        INSERT INTO days VALUES (NEW.opened_us / {DAY_US}, NEW.model, NEW.key, 1, NEW.prompt, NEW.cached, NEW.computed,
            NEW.emitted, NEW.delivered, NEW.billable, iif(NEW.computed, NEW.prompt, 0),
            iif(NEW.computed, NEW.cached, 0))
        ON CONFLICT DO UPDATE SET {_ADDED};
    END;
    """,  # noqa: S608 - names of ours
)

_ROW: Final = f"({', '.join('?' * len(COLUMNS))})"
#: Rows of one statement. Any number up to this has a statement of its own (sqlite3 keeps the last 128 prepared).
_MOST: Final = 100
_INSERTS: Final = [
    f"INSERT INTO exchanges ({', '.join(COLUMNS)}) VALUES {', '.join([_ROW] * rows)} ON CONFLICT (id) DO NOTHING"  # noqa: S608
    for rows in range(_MOST + 1)
]
_SELECT: Final = f"SELECT {', '.join(COLUMNS)} FROM exchanges"  # noqa: S608 - names of ours


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of one group. A name that was not grouped by is None; day is days since 1970 (UTC), of the opening."""

    day: int | None = None
    model: str | None = None
    key: str | None = None
    exchanges: int
    prompt: int
    cached: int
    computed: int
    emitted: int
    delivered: int
    billable: int
    paid_prompt: int
    paid_cached: int


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which exchanges; days inclusive. None: any."""

    first_day: int | None = None
    last_day: int | None = None
    model: str | None = None
    key: str | None = None


def open_ledger(folder: Path) -> sqlite3.Connection:
    """The writing connection: created, migrated and checked. Raises StartupError. For use by one thread at a time."""
    path = folder / FILE
    try:
        db = sqlite3.connect(path, timeout=0.25, isolation_level=None, check_same_thread=False)
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            raise StartupError(f"{path} was written by a newer evap (version {version})", remedy="use that one")
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 4000"):
            db.execute(f"PRAGMA {pragma}")
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            db.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")
        db.execute("INSERT INTO meta VALUES ('node', ?) ON CONFLICT DO NOTHING", (uuid.uuid4().hex,))
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        raise StartupError(f"the ledger {path} cannot be used: {error}", remedy=f"move {path.name}* away") from error
    if found != "ok":
        raise StartupError(
            f"the ledger {path} is damaged: {found}", remedy=f"sqlite3 {path} .recover makes SQL of what is left"
        )
    return db


def insert(db: sqlite3.Connection, records: Sequence[Record]) -> None:
    """All or none; those that are there are skipped. Durable on return. Raises sqlite3.Error.

    The fewer statements the better, for the loop's thread: each hands the interpreter's lock to and fro.
    """
    if len(records) <= _MOST:
        if records:
            _insert(db, records)
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        for start in range(0, len(records), _MOST):
            _insert(db, records[start : start + _MOST])
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _insert(db: sqlite3.Connection, records: Sequence[Record]) -> None:
    values: list[Any] = []
    for record in records:
        values += msgspec.structs.astuple(record)
    db.execute(_INSERTS[len(records)], values)


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection that reads what is committed, beside a writer or without one. StartupError: there is no ledger."""
    path = folder / FILE
    if not path.is_file():
        raise StartupError(f"there is no ledger in {folder}", remedy="--data-dir names the server's data directory")
    db = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    try:
        db.execute("PRAGMA query_only = 1")
        yield db
    finally:
        db.close()


def last(db: sqlite3.Connection) -> int:
    """The number of the newest record; 0: there is none."""
    return int(db.execute("SELECT COALESCE(MAX(seq), 0) FROM exchanges").fetchone()[0])


def node(db: sqlite3.Connection) -> str:
    """What tells this ledger from all others."""
    return str(db.execute("SELECT value FROM meta WHERE name = 'node'").fetchone()[0])


def find(db: sqlite3.Connection, id: str) -> Record | None:
    row = db.execute(f"{_SELECT} WHERE id = ?", (id,)).fetchone()
    return Record(*row) if row else None


def find_operation(db: sqlite3.Connection, key: str, operation: str) -> str | None:
    """Id of the exchange that has used up an operation."""
    sql = "SELECT id FROM exchanges WHERE key = ? AND operation = ? AND operation <> '' LIMIT 1"
    row = db.execute(sql, (key, operation)).fetchone()
    return str(row[0]) if row else None


def last_operations(db: sqlite3.Connection, most: int) -> list[tuple[str, str, str]]:
    """(key, operation, id), oldest first."""
    sql = "SELECT key, operation, id FROM exchanges WHERE operation <> '' ORDER BY seq DESC LIMIT ?"
    return list(reversed(db.execute(sql, (most,)).fetchall()))


def charged_since(db: sqlite3.Connection, first_day: int) -> dict[str, int]:
    """key -> tokens that count towards its budget, of exchanges opened since."""
    sql = "SELECT key, SUM(paid_prompt + billable) FROM days WHERE day >= ? GROUP BY key"
    return dict(db.execute(sql, (first_day,)))


def sums(db: sqlite3.Connection, chosen: Filter, group_by: Sequence[str]) -> list[Usage]:
    """Usage by any of GROUPS; one row with zeros if nothing is grouped and there is nothing."""
    names = [name for name in GROUPS if name in group_by]
    where, values = _where(chosen, "day")
    columns = ", ".join([*names, *(f"COALESCE(SUM({s}), 0)" for s in SUMS)])
    tail = f" GROUP BY {', '.join(names)} ORDER BY {', '.join(names)}" if names else ""
    sql = f"SELECT {columns} FROM days{where}{tail}"  # noqa: S608 - names of ours
    return [Usage(**dict(zip((*names, *SUMS), row, strict=True))) for row in db.execute(sql, values)]


def rows(db: sqlite3.Connection, chosen: Filter, *, after: int = 0, limit: int = MAX_ROWS) -> list[tuple[int, Record]]:
    """(seq, record) in the order of settling, from the one after `after`."""
    where, values = _where(chosen, f"opened_us / {DAY_US}")
    sql = f"SELECT seq, {', '.join(COLUMNS)} FROM exchanges{where or ' WHERE true'} AND seq > ? ORDER BY seq LIMIT ?"  # noqa: S608
    return [(row[0], Record(*row[1:])) for row in db.execute(sql, (*values, after, limit))]


def _where(chosen: Filter, day: str) -> tuple[str, list[Any]]:
    tests = {
        f"{day} >= ?": chosen.first_day, f"{day} <= ?": chosen.last_day, "model = ?": chosen.model,
        "key = ?": chosen.key,
    }  # fmt: skip
    given = {test: value for test, value in tests.items() if value is not None}
    return (" WHERE " + " AND ".join(given) if given else ""), list(given.values())
