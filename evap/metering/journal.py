"""A ring of records in a mapped file: what is settled but not durable yet survives the death of the process.

The loop appends (a copy into memory, no system call); whoever has made records durable moves `tail`. After kill -9 the
page cache still holds the ring, and `recover` reads it. After a crash of the machine it holds what the kernel had
written; the ledger's own commits are the only promise there.

    byte 0      magic; byte 8: tail, u64: position of the oldest record that is needed
    byte 64     the ring. A record starts at `position % size`, a multiple of 8, and never wraps:
                u32 length, u32 xxh3 of the payload, u64 position, payload, zeros to the next multiple of 8.
                length 0xFFFFFFFF: nothing until the end of the ring.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest as digest

MAGIC: Final = int.from_bytes(b"EVAPJRN1", "little")
_START: Final = 64
_HEAD: Final = struct.Struct("<IIQ")
_PAD: Final = 0xFFFF_FFFF
_LENGTH: Final = struct.Struct("<I")


class Journal:
    """One writer (the loop); `free` may be called from another thread. Positions are bytes ever appended."""

    def __init__(self, path: Path, size: int) -> None:
        """An empty ring of `size` bytes, its blocks allocated now. Raises OSError."""
        if size % 8 or size < 4096:
            raise ValueError("a journal has a multiple of 8 bytes, at least 4096")
        self._memory = _allocate(path, _START + size)
        self._words = memoryview(self._memory).cast("B")[:_START].cast("Q")
        self._size = size
        self._head = self._tail = 0
        self._words[1] = 0
        self._memory[_START : _START + _HEAD.size] = bytes(_HEAD.size)
        self._words[0] = MAGIC

    @property
    def used(self) -> int:
        return self._head - self._tail

    @property
    def size(self) -> int:
        return self._size

    def append(self, payload: bytes) -> int:
        """Position after the record, or -1 (and nothing happens) when it does not fit."""
        position, length, size = self._head, len(payload), self._size
        need = 16 + (length + 7 & ~7)
        offset = position % size
        skip = size - offset if offset + need > size else 0
        if position + skip + need - self._tail > size:
            return -1
        if skip:
            _LENGTH.pack_into(self._memory, _START + offset, _PAD)
            position, offset = position + skip, 0
        at = _START + offset
        head = _HEAD.pack(length, digest(payload) & 0xFFFF_FFFF, position)
        self._memory[at : at + 16 + length] = head + payload
        self._head = position + need
        return self._head

    def free(self, position: int) -> None:
        """Records before `position` are durable elsewhere."""
        self._words[1] = position
        self._tail = position

    def close(self) -> None:
        self._words.release()
        self._memory.close()


def _allocate(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # a full disk is said here, and not by SIGBUS later
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def recover(path: Path) -> list[bytes]:
    """Payloads that a dead process left, oldest first; [] for a file that is missing or none of ours."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    size = len(data) - _START
    if size < 4096 or int.from_bytes(data[:8], "little") != MAGIC:
        return []
    position = int.from_bytes(data[8:16], "little")
    found: list[bytes] = []
    end = position + size
    while position < end:
        offset = position % size
        at = _START + offset
        if offset + _HEAD.size > size or _LENGTH.unpack_from(data, at)[0] == _PAD:
            position += size - offset
            continue
        length, sum, stamped = _HEAD.unpack_from(data, at)
        payload = data[at + 16 : at + 16 + length]
        if stamped != position or len(payload) != length or digest(payload) & 0xFFFF_FFFF != sum:
            break
        found.append(payload)
        position += _HEAD.size + (length + 7 & ~7)
    return found
