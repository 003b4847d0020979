"""Makes records durable, off the loop: one thread, one commit for whatever is waiting, and a spool for bad days.

The loop calls `put` once for all that ended in a pass; a record's entry in the table of open exchanges (`opened.py`)
keeps it safe against kill -9 until it is elsewhere. The thread commits everything queued as one transaction. While the
ledger cannot be written (disk full, file locked) records stay where they are; when the table is half full they go to
the spool file, and from there into the ledger when it is back. When the spool cannot be written either, `accepting` is
False: nothing new may be started that could not be recorded. Nothing here ever delays a stream.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from evap.metering import ledger
from evap.metering.opened import OpenTable
from evap.metering.record import Record, decode, encode

SPOOL: Final = "spool.jsonl"
#: The thread waits this long after the first record, so that a busy server commits groups: each commit costs as much as
#: twenty rows, and leaves the loop's thread cold caches.
GATHER_S: Final = 0.006
RETRY_S: Final = 0.5
#: A commit that takes longer than this is said to be stuck: the disk hangs, or whoever has the turn is stopped.
STUCK_NS: Final = 5_000_000_000
#: Records of one transaction, or a few more: what was put together stays together.
MAX_GROUP: Final = 2000
#: Records of exchanges that never had an entry wait in memory alone.
MAX_WAITING: Final = 10_000


class State(enum.Enum):
    OK = "ok"
    SPOOLING = "spooling"  #: the ledger cannot be written; records are kept elsewhere
    FULL = "full"  #: nor can the spool, and the table is full
    CLOSED = "closed"


class Recorder:
    """`db` belongs to the recorder's thread from `start` on. on_durable: called there, with the number of records.

    turn: a file to lock while the ledger is written, where several processes write it.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        table: OpenTable,
        spool: Path,
        *,
        on_state: Callable[[State, str], None] = lambda state, line: None,
        on_durable: Callable[[int], None] = lambda count: None,
        turn: Path | None = None,
        now_ns: Callable[[], int],
    ) -> None:
        self._db, self._table, self._spool = db, table, spool
        self._on_state, self._on_durable = on_state, on_durable
        self._turn = turn
        self._now_ns = now_ns
        self._queue: deque[tuple[Sequence[Record], Sequence[int]]] = deque()  # as they were put
        self._wake = threading.Event()
        self._asleep = False
        self._closing = False
        self._idle = threading.Condition()
        self._taken = 0  # records that the thread has dealt with
        self._put = 0
        self._since_ns = 0  # when the thread began what it is at; 0: nothing
        self.state = State.OK
        self.accepting = True  #: False when State.FULL
        self.detail = ""
        self.durable = 0  #: records committed to the ledger
        self.spooled = spool.stat().st_size if spool.exists() else 0  #: bytes in the spool file
        self._thread = threading.Thread(target=self._run, name="evap-ledger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # The loop's side

    def put(self, records: Sequence[Record], entries: Sequence[int]) -> None:
        """Settled exchanges, and the entry of each in the table (-1: none). Returns at once, and keeps both lists."""
        self._put += len(records)
        self._queue.append((records, entries))
        if self._asleep:
            self._asleep = False
            self._wake.set()

    @property
    def pending(self) -> int:
        """Records that are neither in the ledger nor in the spool file."""
        return self._put - self._taken

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put before is dealt with. Not for the loop's thread. False when it took too long."""
        until = self._put
        with self._idle:
            return self._idle.wait_for(lambda: self._taken >= until, timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write what is waiting and end. False if the thread could not in time: the table keeps the rest."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def trouble(self) -> str:
        """Empty, or why records do not get into the ledger."""
        if self.state is not State.OK:
            return f"{self.state.value}: {self.detail}"
        since_ns = self._since_ns
        busy_ns = self._now_ns() - since_ns if since_ns else 0
        return f"stuck: it has not been written to for {busy_ns // 10**9} s" if busy_ns > STUCK_NS else ""

    # The thread's side

    def _run(self) -> None:
        while True:
            self._asleep = True
            if not self._queue and not self._closing:
                self._wake.wait(RETRY_S if self.spooled or self.state is not State.OK else None)
            self._asleep = False
            self._wake.clear()
            if self._queue and not self._closing:
                self._wake.wait(GATHER_S)
            self._work()
            if self._closing and (not self._queue or self.state is not State.OK):
                break
            if self.state is not State.OK and not self._closing:
                self._wake.clear()
                self._wake.wait(RETRY_S)
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _work(self) -> None:
        """One try at everything that waits. What comes meanwhile gathers: small commits cost as much as large ones."""
        until = self._put
        self._since_ns = self._now_ns()
        try:
            if self.spooled:
                self._unspool()
            while self._queue and self._taken < until:
                records, entries, batches = self._group()
                self._insert(records)
                self._since_ns = self._now_ns()
                self.durable += len(records)
                self._done(entries, batches)
                self._on_durable(len(records))
            self._enter(State.OK, "")
        except (sqlite3.Error, OSError) as error:
            self._set_aside(str(error))
        finally:
            self._since_ns = 0

    def _insert(self, records: list[Record]) -> None:
        """With several processes, in turns: a lock that is waited for is fairer than SQLite's, which is polled."""
        if self._turn is None:
            ledger.insert(self._db, records)
            return
        fd = os.open(self._turn, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            ledger.insert(self._db, records)
        finally:
            os.close(fd)

    def _group(self) -> tuple[list[Record], list[int], int]:
        """What waits, oldest first: records, their entries, and how many times `put` was called for them."""
        records, entries, batches = list[Record](), list[int](), 0
        for batches in range(1, len(self._queue) + 1):
            some, theirs = self._queue[batches - 1]
            records += some
            entries += theirs
            if len(records) >= MAX_GROUP:
                break
        return records, entries, batches

    def _done(self, entries: Sequence[int], batches: int) -> None:
        """The records of these are safe elsewhere."""
        for _ in range(batches):
            self._queue.popleft()
        self._table.free([entry for entry in entries if entry >= 0])
        with self._idle:
            self._taken += len(entries)
            self._idle.notify_all()

    def _set_aside(self, reason: str) -> None:
        """The ledger is not to be had. Records wait while the table has room for others; then they are spooled."""
        if not (self._closing or self._table.crowded or self.pending > MAX_WAITING):
            self._enter(State.SPOOLING, reason)
            return
        try:
            while self._queue:
                records, entries, batches = self._group()
                self._append_spool(b"".join(encode(record) + b"\n" for record in records))
                self._done(entries, batches)
            self._enter(State.SPOOLING, reason)
        except OSError as error:
            self._enter(
                State.FULL if self._table.crowded else State.SPOOLING, f"{reason}; spool: {error.strerror or error}"
            )

    def _append_spool(self, data: bytes) -> None:
        fd = os.open(self._spool, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            before = os.fstat(fd).st_size
            try:
                written = os.write(fd, data)
                if written != len(data):
                    raise OSError("the disk is full")
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, before)  # half a line is no record
                raise
        finally:
            os.close(fd)
        self.spooled += len(data)

    def _unspool(self) -> None:
        rows = read_spool(self._spool)
        for start in range(0, len(rows), MAX_GROUP):
            self._insert(rows[start : start + MAX_GROUP])
        self._spool.unlink(missing_ok=True)
        self.spooled = 0
        self.durable += len(rows)

    def _enter(self, state: State, detail: str) -> None:
        changed = state is not self.state
        self.state, self.detail, self.accepting = state, detail, state is not State.FULL
        if changed:
            self._on_state(state, detail)


def read_spool(path: Path) -> list[Record]:
    """An unfinished last line, of a process that died in it, is left out (the table has the record)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")
    return [decode(line) for line in lines[:-1] if line]
