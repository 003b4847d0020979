"""Idempotency keys for several processes: `operations.py` as a table in shared memory.

Sets of eight places, found by a digest of (key id, operation). Running operations stay; of those that are used up the
oldest of a set makes room, and then the ledger must be asked (`forgot`). One set is one lock, which the kernel lets go
of when its holder dies.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final, NamedTuple

from evap.errors import Overloaded
from evap.metering.operations import conflict
from evap.metering.shared_accounts import OTHER_LOCKS, SharedAccounts, digest, locked

SETS: Final = 16_384
WAYS: Final = 8
_PLACE: Final = struct.Struct("<16sQBBB45s")  # digest, number, state, process, length of the id, id
_HEAD: Final = 64  # byte 0: forgot; byte 8: numbers given out
_FREE, _RUNNING, _USED = range(3)
_STATE_AT: Final = 24
SIZE: Final = _HEAD + SETS * WAYS * _PLACE.size


class SharedOperations:
    """fd: of SIZE bytes, the same in all processes. process: our number, from 0."""

    def __init__(self, fd: int, process: int) -> None:
        self._fd, self._process = fd, process
        self._map = mmap.mmap(fd, SIZE)

    @property
    def forgot(self) -> bool:
        """Some that were used up are not here any more."""
        return bool(self._map[0])

    def begin(self, key: str, operation: str, id: str) -> None:
        """Raises Conflict for one that is running or used up, in any process."""
        name = digest(key, operation)
        with locked(self._fd, self._lock(name)):
            at = self._find(name)
            if at is not None:
                _, _, state, _, size, text = _PLACE.unpack_from(self._map, at)
                raise conflict(text[:size].decode(), running=state == _RUNNING)
            self._put(self._room(name), name, _RUNNING, id)

    def end(self, key: str, operation: str, id: str, *, used_up: bool) -> None:
        name = digest(key, operation)
        with locked(self._fd, self._lock(name)):
            at = self._find(name)
            if at is None:
                return
            if used_up:
                self._put(at, name, _USED, id)
            else:
                self._map[at + _STATE_AT] = _FREE

    def remember(self, key: str, operation: str, id: str) -> None:
        """It is used up, whatever is known of it."""
        name = digest(key, operation)
        with locked(self._fd, self._lock(name)):
            at = self._find(name)
            self._put(self._room(name) if at is None else at, name, _USED, id)

    def bury(self, process: int) -> None:
        """A process has died: what ran there runs no more. What was used up has been `remember`ed before."""
        for at in range(_HEAD, SIZE, _PLACE.size):
            if self._map[at + _STATE_AT] == _RUNNING and self._map[at + _STATE_AT + 1] == process:
                name = self._map[at : at + 16]
                with locked(self._fd, self._lock(name)):
                    self._map[at + _STATE_AT] = _FREE

    def close(self) -> None:
        self._map.close()

    # Places

    def _set(self, name: bytes) -> int:
        return int.from_bytes(name[:4]) % SETS

    def _lock(self, name: bytes) -> int:
        return OTHER_LOCKS + self._set(name)

    def _places(self, name: bytes) -> range:
        start = _HEAD + self._set(name) * WAYS * _PLACE.size
        return range(start, start + WAYS * _PLACE.size, _PLACE.size)

    def _find(self, name: bytes) -> int | None:
        for at in self._places(name):
            if self._map[at + _STATE_AT] != _FREE and self._map[at : at + 16] == name:
                return at
        return None

    def _room(self, name: bytes) -> int:
        """A free place, or that of the oldest that is used up. Raises Overloaded."""
        oldest, number = None, 1 << 64
        for at in self._places(name):
            state = self._map[at + _STATE_AT]
            if state == _FREE:
                return at
            (own,) = struct.unpack_from("<Q", self._map, at + 16)
            if state == _USED and own < number:
                oldest, number = at, own
        if oldest is None:
            raise Overloaded("too many operations run at once", retry_after_s=1)
        self._map[0] = 1
        return oldest

    def _put(self, at: int, name: bytes, state: int, id: str) -> None:
        """Its state is written last: a place that is half-written is free."""
        text = id.encode()[:45]
        self._map[at + _STATE_AT] = _FREE
        _PLACE.pack_into(self._map, at, name, self._next(), _FREE, self._process & 0xFF, len(text), text)
        self._map[at + _STATE_AT] = state

    def _next(self) -> int:
        """Roughly increasing: two sets may be given the same."""
        (number,) = struct.unpack_from("<Q", self._map, 8)
        struct.pack_into("<Q", self._map, 8, number + 1)
        return int(number)


class SharedBooks(NamedTuple):
    """What several processes of one server have in common; the parent has the directory's lock, and recovers."""

    number: int  #: of this process, from 0
    accounts: SharedAccounts
    operations: SharedOperations
