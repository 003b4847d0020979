"""The files of a process in the data directory, and how those that a killed one left are settled into the ledger.

`open`, `spool.jsonl` and `counters-M` (for the M-th engine) belong to a server of one process; `open.N`,
`spool.N.jsonl` and `counters.N-M` to the N-th of several.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from evap.errors import StartupError
from evap.messages import Usage
from evap.metering import accounts, ledger, recorder, survivors
from evap.metering.accounts import Account
from evap.metering.counters import PREFIX
from evap.metering.record import INTERRUPTED, Record, charged

#: Several processes write the ledger one after the other: whoever holds this file's lock.
TURN: Final = "turn"


class Files(NamedTuple):
    """Those of one process. pages: how the names of its engines' counters begin."""

    table: Path
    spool: Path
    pages: str


def pages(number: int | None) -> str:
    return PREFIX if number is None else f"{PREFIX.rstrip('-')}.{number}-"


def files(folder: Path, number: int | None = None) -> Files:
    """number: of one of several processes; None: there is one."""
    if number is None:
        return Files(folder / "open", folder / recorder.SPOOL, pages(None))
    return Files(folder / f"open.{number}", folder / f"spool.{number}.jsonl", pages(number))


def all_files(folder: Path) -> list[Files]:
    """Of whatever processes there have been."""
    numbers = {int(suffix) for path in folder.glob("open.*") if (suffix := path.suffix[1:]).isdecimal()}
    numbers |= {int(name) for path in folder.glob("spool.*.jsonl") if (name := path.name.split(".")[1]).isdecimal()}
    return [files(folder), *(files(folder, number) for number in sorted(numbers))]


def recover(
    db: sqlite3.Connection, folder: Path, left_by: Iterable[Files], *, policy: str, wall_ns: int
) -> list[Record]:
    """Settle it all; what is returned is durable, and the files are gone. Raises OSError and sqlite3.Error."""
    found: list[Record] = []
    for place in left_by:
        rows = recorder.read_spool(place.spool)
        rows += survivors.records(folder, place.table, policy=policy, now_us=wall_ns // 1000, pages=place.pages)
        for start in range(0, len(rows), recorder.MAX_GROUP):
            ledger.insert(db, rows[start : start + recorder.MAX_GROUP])
        place.spool.unlink(missing_ok=True)
        place.table.unlink(missing_ok=True)
        found += rows
    return found


def interrupted(records: Iterable[Record]) -> list[Record]:
    """Those that their process had not settled itself."""
    return [record for record in records if record.end == INTERRUPTED]


def tokens_by_key(records: Iterable[Record]) -> dict[str, int]:
    """What these count towards limits and budgets, by key id."""
    sums: dict[str, int] = {}
    for r in records:
        usage = Usage(prompt=r.prompt, cached=r.cached, computed=r.computed, emitted=r.emitted, delivered=r.delivered)
        sums[r.key] = sums.get(r.key, 0) + charged(usage, r.billable)
    return sums


def take_lock(folder: Path) -> int:
    """The descriptor that holds a data directory for one server. Raises StartupError when another has it."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise StartupError(f"another server uses --data-dir {folder}", remedy="a directory for each server") from None
    return lock


def load_used(db: sqlite3.Connection, of: Mapping[str, Account], wall_s: int) -> None:
    """What the ledger says was used in the present day and month."""
    today, month = wall_s // 86_400, accounts.month_start(wall_s)
    accounts.load_used(of, ledger.charged_since(db, today), ledger.charged_since(db, month))
