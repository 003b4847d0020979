"""What keys may do, for several processes that serve the same keys: the state of `accounts.py` in shared memory.

    row         digest of the key's id | which of two states counts | state | state | by process: held
    state       the buckets (level, time, limit) and the budgets (period, used)
    held        what one process's running exchanges hold: streams, tokens reserved of day and month, of the rate

Each call takes the row's lock, loads the row into the process's own Account, lets `accounts.py` decide, and stores the
result: the rules are those of one process, and a limit holds for all processes together, exactly. A call takes some ten
microseconds. The lock is the kernel's (fcntl), on a byte of the memory's descriptor, and so is let go of when its
holder dies; a state is written to the place that does not count, and then made to count by one store. What a process
that died had held is taken back by `bury`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from evap.errors import Limit, StartupError
from evap.metering import accounts
from evap.metering.accounts import Account, Bucket, Key, Ticket

_STATE: Final = struct.Struct("<16sqq16sqqqqqq")
_DIGEST: Final = 16
_ROW_HEAD: Final = 24  # digest, which
_HELD: Final = 4
STREAMS, DAY, MONTH, RATE = range(_HELD)
_EMPTY: Final = bytes(_DIGEST)
#: Where the locks of other tables begin (`shared_operations.py`); those of rows are below.
OTHER_LOCKS: Final = 1 << 40
_TABLE_LOCK: Final = OTHER_LOCKS - 1


def digest(*parts: str) -> bytes:
    """16 bytes that stand for a name of any length."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=_DIGEST).digest()


@contextlib.contextmanager
def locked(fd: int, place: int) -> Iterator[None]:
    """For as long as it takes to change a few numbers. No other descriptor of the file may be closed meanwhile."""
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, place)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, place)


class SharedAccounts:
    """fd: of the memory, the same in all processes (inherited). process: our number, from 0; -1: that of nobody."""

    def __init__(self, fd: int, *, rows: int, processes: int, process: int) -> None:
        self._fd, self._rows, self._processes, self._process = fd, rows, processes, process
        self._row_bytes = _ROW_HEAD + 2 * _STATE.size + 8 * _HELD * processes
        self._map = mmap.mmap(fd, self.size(rows, processes))
        self._row_of: dict[str, int] = {}

    @staticmethod
    def size(rows: int, processes: int) -> int:
        """Bytes of a table."""
        return rows * (_ROW_HEAD + 2 * _STATE.size + 8 * _HELD * processes)

    # The rules, as in accounts.py

    def admit(self, account: Account, now_ns: int, wall_s: int) -> None:
        with self._loaded(account):
            accounts.admit(account, now_ns, wall_s)

    def reserve(
        self, ticket: Ticket, *, prompt: int, n: int, asked: int | None, room: int, now_ns: int, wall_s: int
    ) -> int:
        account = ticket.account
        if account is None:
            return asked if asked is not None else room
        with self._loaded(account) as row:
            most = accounts.reserve(ticket, prompt=prompt, n=n, asked=asked, room=room, now_ns=now_ns, wall_s=wall_s)
            self._hold(row, RATE, ticket.rate)
        return most

    def settle(self, ticket: Ticket, tokens: int) -> None:
        if ticket.account is None:
            return
        with self._loaded(ticket.account) as row:
            accounts.settle(ticket, tokens)
            self._hold(row, RATE, -ticket.rate)

    def limits(self, account: Account, now_ns: int) -> list[Limit]:
        """As of the last call for this account, which has just been made."""
        return accounts.limits(account, now_ns)

    def enter(self, account: Account) -> None:
        """A key of the key file: its row is made, or found as others left it. Raises StartupError: no row is free."""
        if account.key.id not in self._row_of:
            self._row_of[account.key.id] = self._find(account)

    def check_room(self, ids: Iterable[str]) -> None:
        """Raises StartupError if `enter` would, for one of these keys: before any of them has taken a row for good."""
        with locked(self._fd, _TABLE_LOCK):
            names = [self._map[at : at + _DIGEST] for at in range(0, self._rows * self._row_bytes, self._row_bytes)]
        if len({digest(id) for id in ids}.difference(names)) > names.count(_EMPTY):
            raise self._full()

    def change(self, account: Account, key: Key, now_ns: int) -> None:
        """The key file was read again. Whoever comes first with a new limit makes the bucket full."""
        with self._loaded(account):
            if account.requests.limit != key.requests_per_minute:
                account.requests = Bucket(key.requests_per_minute, now_ns)
            if account.tokens.limit != key.tokens_per_minute:
                account.tokens = Bucket(key.tokens_per_minute, now_ns)
            account.day.limit, account.month.limit = key.tokens_per_day, key.tokens_per_month
            account.key = key

    def bury(self, process: int, charged: dict[str, int]) -> None:
        """A process has died: nothing is held by it any more, and its interrupted exchanges used so much, by key id."""
        used = {digest(id): tokens for id, tokens in charged.items()}
        for row in range(self._rows):
            at = row * self._row_bytes
            name = self._map[at : at + _DIGEST]
            if name == _EMPTY:
                return
            with locked(self._fd, row):
                tokens, rate = used.get(name, 0), self._held(row, process)[RATE]
                state = list(_STATE.unpack(self._state(row)))
                level = _level(state[3]) + (rate - tokens if rate else 0) * accounts.MINUTE_NS
                state[3] = _packed(min(level, state[5] * accounts.MINUTE_NS))
                state[7] += tokens
                state[9] += tokens
                self._store(row, _STATE.pack(*state))
                self._put_held(row, process, (0,) * _HELD)

    # Rows

    def _find(self, account: Account) -> int:
        name = digest(account.key.id)
        with locked(self._fd, _TABLE_LOCK):
            for row in range(self._rows):
                at = row * self._row_bytes
                found = self._map[at : at + _DIGEST]
                if found == name:
                    return row
                if found == _EMPTY:
                    self._store(row, _dump(account))
                    self._map[at : at + _DIGEST] = name
                    return row
        raise self._full()

    def _full(self) -> StartupError:
        return StartupError(
            f"there have been {self._rows} keys, with those that are gone: there is no room for more",
            remedy="start the server again: it makes room for them",
        )

    def _state(self, row: int) -> bytes:
        at = row * self._row_bytes + _DIGEST
        at += 8 + self._map[at] * _STATE.size
        return self._map[at : at + _STATE.size]

    def _store(self, row: int, state: bytes) -> None:
        which = row * self._row_bytes + _DIGEST
        other = 1 - self._map[which]
        at = which + 8 + other * _STATE.size
        self._map[at : at + _STATE.size] = state
        self._map[which] = other

    def _held_at(self, row: int, process: int) -> int:
        return row * self._row_bytes + _ROW_HEAD + 2 * _STATE.size + 8 * _HELD * process

    def _held(self, row: int, process: int) -> tuple[int, ...]:
        return struct.unpack_from("<4q", self._map, self._held_at(row, process))

    def _put_held(self, row: int, process: int, held: tuple[int, ...]) -> None:
        struct.pack_into("<4q", self._map, self._held_at(row, process), *held)

    def _hold(self, row: int, what: int, amount: int) -> None:
        if amount:
            held = list(self._held(row, self._process))
            held[what] += amount
            self._put_held(row, self._process, tuple(held))

    def _all_held(self, row: int) -> tuple[int, int, int]:
        """Of all processes: streams, tokens of the day, tokens of the month."""
        numbers = struct.unpack_from(f"<{_HELD * self._processes}q", self._map, self._held_at(row, 0))
        return sum(numbers[STREAMS::_HELD]), sum(numbers[DAY::_HELD]), sum(numbers[MONTH::_HELD])

    @contextlib.contextmanager
    def _loaded(self, account: Account) -> Iterator[int]:
        row = self._row_of[account.key.id]
        with locked(self._fd, row):
            before = self._all_held(row)
            periods = _load(account, self._state(row))
            account.streams, account.day.reserved, account.month.reserved = before
            try:
                yield row
            finally:
                self._keep(row, account, before, periods)

    def _keep(self, row: int, account: Account, before: tuple[int, int, int], periods: tuple[int, int]) -> None:
        for what, period, budget in ((DAY, periods[0], account.day), (MONTH, periods[1], account.month)):
            if budget.period != period:  # a new day: what was reserved counts for the old one
                for process in range(self._processes):
                    held = list(self._held(row, process))
                    held[what] = 0
                    self._put_held(row, process, tuple(held))
                before = (before[0], 0, before[2]) if what == DAY else (before[0], before[1], 0)
        self._store(row, _dump(account))
        self._hold(row, STREAMS, account.streams - before[0])
        self._hold(row, DAY, account.day.reserved - before[1])
        self._hold(row, MONTH, account.month.reserved - before[2])

    def close(self) -> None:
        self._map.close()


def make_memory(name: str, size: int) -> int:
    """A descriptor of zeroed memory that children may inherit when they are told to."""
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return fd


def _level(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _packed(level: int) -> bytes:
    return level.to_bytes(16, "little", signed=True)


def _dump(account: Account) -> bytes:
    requests, tokens = account.requests, account.tokens
    return _STATE.pack(
        _packed(requests.level), requests.then_ns, requests.limit, _packed(tokens.level), tokens.then_ns, tokens.limit,
        account.day.period, account.day.used, account.month.period, account.month.used,
    )  # fmt: skip


def _load(account: Account, state: bytes) -> tuple[int, int]:
    """The periods (day, month) that were loaded."""
    level, then, limit, level2, then2, limit2, day, used, month, used2 = _STATE.unpack(state)
    # A limit that another process has not heard of yet, or has dropped already, is still one here.
    account.requests.set(limit or account.key.requests_per_minute, _level(level), then)
    account.tokens.set(limit2 or account.key.tokens_per_minute, _level(level2), then2)
    account.day.period, account.day.used = day, used
    account.month.period, account.month.used = month, used2
    return day, month
