"""The parent's part in accounts: memory that all loop processes share, and the last rites for one that died.

The parent holds the data directory's lock, recovers what an earlier server left, and copies the ledger to a usage sink.
It admits nothing and settles nothing but what its dead children had open.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from evap.config import MeterConfig
from evap.errors import StartupError
from evap.metering import accounts, keys, ledger, operations, recovery
from evap.metering.accounts import Account
from evap.metering.record import Record
from evap.metering.shared_accounts import SharedAccounts, make_memory
from evap.metering.shared_operations import SIZE, SharedOperations
from evap.metering.sink import Sink
from evap.metrics import USAGE_FIELDS
from evap.snapshot import Snapshot
from evap.turns import Turns

logger = logging.getLogger("evap.accounting")
#: Keys that a key file may have once the server runs, at least.
MIN_ROWS: Final = 1024


class Books:
    """processes: how many there will be. Everything here may block, and is called in a thread."""

    def __init__(
        self, config: MeterConfig, processes: int, *, now_ns: Callable[[], int], wall_ns: Callable[[], int]
    ) -> None:
        self._config, self._processes = config, processes
        self._now_ns, self._wall_ns = now_ns, wall_ns
        self.folder = Path(config.data_dir) if config.data_dir else None
        self._lock: int | None = None
        self._db: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None  # of the loop's thread
        self._before = self._records = 0  # records in the ledger at the start, and since
        self.sink: Sink | None = None

    def open(self) -> None:
        """Raises StartupError for all that a loop process would: keys, prices, the data directory."""
        accounts.self_test()
        config = self._config
        ring = keys.read(Path(config.api_keys)).keys if config.api_keys else {}
        wall_s = self._wall_ns() // 1_000_000_000
        known = {id: Account(key, now_ns=self._now_ns(), wall_s=wall_s) for id, key in ring.items()}
        self.rows = max(MIN_ROWS, 4 * len(known))
        self.accounts_fd = make_memory("evap-accounts", SharedAccounts.size(self.rows, self._processes))
        self.operations_fd = make_memory("evap-operations", SIZE)
        self._accounts = SharedAccounts(self.accounts_fd, rows=self.rows, processes=self._processes, process=-1)
        self._operations = SharedOperations(self.operations_fd, -1)
        self.turns_fd = make_memory("evap-turns", Turns.size(self._processes))
        self._turns = mmap.mmap(self.turns_fd, Turns.size(self._processes))
        if self.folder is not None:
            self._open_folder(self.folder, known, wall_s)
        elif config.usage_sink:
            raise StartupError("--usage-sink copies the ledger, and there is none", remedy="add --data-dir DIR")
        for account in known.values():
            self._accounts.enter(account)
        if self.folder is not None and config.usage_sink:
            self.sink = Sink(config.usage_sink, self.folder)
            self.sink.start()

    def _open_folder(self, folder: Path, known: dict[str, Account], wall_s: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = recovery.take_lock(folder)
            db = self._db = ledger.open_ledger(folder)
            self._recover(folder, recovery.all_files(folder))
            self._reader, self._before = ledger.open_ledger(folder), ledger.last(db)
        except OSError as error:
            raise StartupError(
                f"--data-dir {folder} cannot be used: {error.strerror}", remedy="a directory of ours, with space"
            ) from error
        for used in ledger.last_operations(db, operations.REMEMBERED + 1):
            self._operations.remember(*used)
        recovery.load_used(db, known, wall_s)

    @property
    def inherited(self) -> list[int]:
        """Descriptors for loop processes. The lock is among them: the directory is ours until the last one is gone."""
        return [self.accounts_fd, self.operations_fd, self.turns_fd, *([self._lock] if self._lock is not None else [])]

    def bury(self, number: int) -> list[Record]:
        """A loop process has ended: what it had open is settled, and what it held is free. The interrupted ones.

        Raises OSError or sqlite3.Error when the ledger cannot be written; may be tried again.
        """
        records: list[Record] = []
        Turns(memoryview(self._turns), process=number, processes=self._processes).bury()  # whatever the ledger says
        if self.folder is not None:
            records = self._recover(self.folder, [recovery.files(self.folder, number)])
        interrupted = recovery.interrupted(records)
        for record in records:
            if record.operation:
                self._operations.remember(record.key, record.operation, record.id)
        self._operations.bury(number)
        self._accounts.bury(number, recovery.tokens_by_key(interrupted))
        return interrupted

    def _recover(self, folder: Path, files: list[recovery.Files]) -> list[Record]:
        assert self._db is not None
        fd = os.open(folder / recovery.TURN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            return recovery.recover(
                self._db, folder, files, policy=self._config.billable, wall_ns=self._wall_ns()
            )  # fmt: skip
        finally:
            os.close(fd)

    def snapshot(self) -> Snapshot:
        """The parent's own numbers for /metrics."""
        found = Snapshot({}, {}, {})
        if self._reader is not None:
            with contextlib.suppress(sqlite3.Error):  # it is busy: the last number known
                self._records = ledger.last(self._reader) - self._before
            found.values |= {"evap_ledger_records": {"": float(self._records)}}
            found.families["evap_ledger_records"] = ("counter", "Records committed to the ledger", "")
        if self.sink is not None:
            found.values |= {"evap_sink_ok": {"": float(not self.sink.error)}}
            found.values |= {"evap_sink_records": {"": float(self.sink.copied)}}
            found.families["evap_sink_ok"] = ("gauge", "1 while the usage sink answers, or there is none", "")
            found.families["evap_sink_records"] = ("counter", "Records copied to the usage sink", "")
        return found

    def close(self) -> None:
        if self.sink is not None:
            self.sink.stop()
        for db in (self._db, self._reader):
            if db is not None:
                db.close()
        if self._lock is not None:
            os.close(self._lock)


def lost(records: list[Record]) -> Snapshot:
    """What the interrupted exchanges of a dead process add to /metrics."""
    tokens: dict[str, float] = {name: float(sum(getattr(r, name) for r in records)) for name in USAGE_FIELDS}
    return Snapshot({"evap_exchanges": {"interrupted": float(len(records))}, "evap_tokens": tokens}, {}, {})
