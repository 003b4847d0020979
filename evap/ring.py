"""The token ring: bounded shared memory, one producer (an engine), one consumer (the loop).

Memory layout, little-endian u64 words (`metering/kernels.cu` writes the same; a test compares the two):

    word 0      magic "EVAPRING"                      \\
    word 1      version << 32 | capacity               | line 0, written by the producer
    word 2      head: records produced so far         /
    word 3      share of the engine's KV cache that generations hold, in 2^-32 (engines that know it)
    word 4      beats: parts of steps that were computed so far, a layer each (engines that say it)
    word 5      when the step began that is being computed (CLOCK_MONOTONIC, ns); 0: none is
    word 8      tail: records consumed so far         -- line 1, written by the consumer
    word 16...  capacity records of four words (32 bytes)

    record      tag << 32 | generation << 16 | slot    tag = 1 + position mod (2^32 - 1)
                tag << 32 | token id (int32 as u32)
                tag << 32 | index
                tag << 32 | step (24 bits) << 8 | flags

Rules:
- Every word carries the tag of the record's position, and the consumer accepts a record only if all four match.
  So a half-written or half-overwritten record can never be read, whatever the order in which stores become
  visible; all that is needed of the machine is that an aligned 8-byte store or load is one access. numpy copies
  one u64 at a time along a strided axis, and both ends copy only along the strided (record) axis for that reason.
- A tag is never 0, so that zeroed memory holds no record.
- The producer never waits and never loads a record. If the consumer is lapped, it skips to the oldest record that is
  still whole and counts the rest in `lost`: seen + lost == produced. Who may wait asks `room()` first.
- `head` is written after the records. It only serves to size a read and to notice a lap; a record is found by its tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from evap.messages import TokenBatch

RING_MAGIC: Final = int.from_bytes(b"EVAPRING", "little")
RING_VERSION: Final = 1
HEADER_BYTES: Final = 128
RECORD_BYTES: Final = 32
RECORD_WORDS: Final = 4
WORD_MAGIC: Final = 0
WORD_SHAPE: Final = 1  # version << 32 | capacity
WORD_HEAD: Final = 2
WORD_KV_USAGE: Final = 3
WORD_BEATS: Final = 4
WORD_STEP_SINCE: Final = 5
WORD_TAIL: Final = 8
WORD_RECORDS: Final = 16
TAG_CYCLE: Final = (1 << 32) - 1
STEP_MASK: Final = (1 << 24) - 1
MAX_CAPACITY: Final = 1 << 24
_FIRST_CHECKS: Final = 4

Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = Sequence[int] | npt.NDArray[Any]


def ring_bytes(capacity: int) -> int:
    """Bytes of shared memory that a ring of `capacity` records takes. Raises ValueError for a capacity out of range."""
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ValueError(f"ring capacity {capacity} is not in 1..{MAX_CAPACITY}")
    return HEADER_BYTES + capacity * RECORD_BYTES


def tag_of(position: int) -> int:
    """The 32-bit tag of a position: 1..2^32-1, never 0."""
    return 1 + position % TAG_CYCLE


def format_ring(memory: Any, capacity: int, position: int = 0) -> None:
    """Make `memory` (writable buffer, 8-byte aligned, at least `ring_bytes(capacity)`) an empty ring.

    `position` is the first record's. Only one process may touch the memory meanwhile.
    """
    words = np.frombuffer(_cells(memory, capacity), dtype="<u8")
    words[:] = 0
    words[WORD_SHAPE] = RING_VERSION << 32 | capacity
    words[WORD_HEAD] = position
    words[WORD_TAIL] = position
    words[WORD_MAGIC] = RING_MAGIC


def _cells(memory: Any, capacity: int) -> memoryview:
    """The ring as a flat view of u64."""
    size = ring_bytes(capacity)
    view = memoryview(memory).cast("B")
    if view.readonly or view.nbytes < size:
        raise ValueError(f"a ring of {capacity} records needs {size} writable bytes, not {view.nbytes}")
    cells = view[:size].cast("Q")
    if not np.frombuffer(cells, dtype="<u8").flags.aligned:
        raise ValueError("ring memory must be aligned to 8 bytes")
    return cells


def _attach(memory: Any, capacity: int) -> memoryview:
    """The ring's words; formats memory whose header is still all zero. Raises ValueError for a foreign ring."""
    cells = _cells(memory, capacity)
    if not any(cells[:WORD_RECORDS]):
        format_ring(memory, capacity)
    if cells[WORD_MAGIC] != RING_MAGIC:
        raise ValueError("this memory is not a token ring")
    version, size = divmod(cells[WORD_SHAPE], 1 << 32)
    if version != RING_VERSION:
        raise ValueError(f"token ring of version {version}, expected {RING_VERSION}")
    if size != capacity:
        raise ValueError(f"token ring of {size} records, expected {capacity}")
    return cells


def _records(cells: memoryview) -> Words:
    """The records, shape (capacity, RECORD_WORDS)."""
    words: Words = np.frombuffer(cells, dtype="<u8")
    return words[WORD_RECORDS:].reshape(-1, RECORD_WORDS)


def _tags(iota: Words, first: int, count: int) -> Words:
    """Tags of `count` positions from `first`; `iota` counts from 0 and is at least as long."""
    tag = tag_of(first)
    if tag + count - 1 <= TAG_CYCLE:
        return iota[:count] + np.uint64(tag)
    return (iota[:count] + np.uint64(tag - 1)) % np.uint64(TAG_CYCLE) + np.uint64(1)


class RingWriter:
    """The producer's end. Zeroed memory is formatted; a ring that exists is continued.

    After a producer was killed, the next one continues behind the last whole record and wipes what was half-written.
    Give memory to a second process only after one end has been made (formatting is not a race to run).
    """

    def __init__(self, memory: Any, capacity: int) -> None:
        self._cells = _attach(memory, capacity)
        self._records = _records(self._cells)
        self._iota: Words = np.arange(capacity, dtype=np.uint64)
        self.capacity = capacity
        self.position = self._recover()

    def _recover(self) -> int:
        """First position that holds no whole record; words that carry its tag or a later one become 0."""
        # The tail is ahead of the head if the reader took records, or saw itself lapped, before the head was written.
        base = max(self._cells[WORD_HEAD], self._cells[WORD_TAIL])
        places = (self._iota + np.uint64(base)) % np.uint64(self.capacity)
        tags = self._records[places] >> np.uint64(32)
        whole = (tags == _tags(self._iota, base, self.capacity)[:, None]).all(axis=1)
        done = self.capacity if whole.all() else int(whole.argmin())
        ahead = (tags + np.uint64(TAG_CYCLE - tag_of(base + done))) % np.uint64(TAG_CYCLE)
        torn = ((tags > 0) & (ahead < TAG_CYCLE // 2)).any(axis=1)
        self._records[places[torn]] = 0
        self._cells[WORD_HEAD] = base + done
        return base + done

    def room(self) -> int:
        """Records that can be written now without overwriting one the reader has not taken (0 when lapped)."""
        return max(0, self.capacity - (self.position - self._cells[WORD_TAIL]))

    def tell_kv_usage(self, share: float) -> None:
        """0..1, for whoever reads the ring."""
        self._cells[WORD_KV_USAGE] = int(share * (1 << 32))

    def beat(self) -> None:
        """A part of a step is computed."""
        self._cells[WORD_BEATS] += 1

    def tell_step(self, since_ns: int) -> None:
        """A step begins now; 0: it has ended."""
        self._cells[WORD_STEP_SINCE] = since_ns

    def write(self, slot: Ints, generation: Ints, token: Ints, index: Ints, flags: Ints, step: int) -> None:
        """Append one record per element, in order, then publish the head.

        slot, generation: 0..65535; token: int32; index: 0..2^32-1; flags: 0..255; all of one length. step is kept
        modulo 2^24. Overwrites the oldest records when there is no room, as the device does.
        """
        columns = np.empty((RECORD_WORDS, len(slot)), np.uint64)
        columns[0] = _unsigned(generation, 0xFFFF) << np.uint64(16) | _unsigned(slot, 0xFFFF)
        columns[1] = _unsigned(token, 0xFFFF_FFFF)
        columns[2] = _unsigned(index, 0xFFFF_FFFF)
        columns[3] = _unsigned(flags, 0xFF) | np.uint64((step & STEP_MASK) << 8)
        first, count = self.position, columns.shape[1]
        if count > self.capacity:  # these would be overwritten at once
            columns = columns[:, count - self.capacity :]
            first += count - self.capacity
        self._store(first, columns)
        self.position += count
        self._cells[WORD_HEAD] = self.position

    def _store(self, first: int, columns: Words) -> None:
        count, place = columns.shape[1], first % self.capacity
        columns |= _tags(self._iota, first, count) << np.uint64(32)
        upto = min(count, self.capacity - place)
        for word in range(RECORD_WORDS):
            self._records[place : place + upto, word] = columns[word, :upto]
            if upto < count:
                self._records[: count - upto, word] = columns[word, upto:]

    def close(self) -> None:
        """Let go of the memory (an mmap or SharedMemory cannot be closed before)."""
        del self._records
        self._cells.release()


def _unsigned(values: Ints, mask: int) -> Words:
    return np.asarray(values, dtype=np.int64).astype(np.uint64) & np.uint64(mask)


class RingReader:
    """The consumer's end. Continues at the tail that the ring holds.

    lost: records that were overwritten before they could be read.
    """

    def __init__(self, memory: Any, capacity: int) -> None:
        self._cells = _attach(memory, capacity)
        self._records = _records(self._cells)
        self._iota: Words = np.arange(capacity, dtype=np.uint64)
        self.capacity = capacity
        self.lost = 0
        self._move(self._cells[WORD_TAIL])

    @property
    def kv_usage(self) -> float:
        """What the producer told last."""
        return self._cells[WORD_KV_USAGE] / (1 << 32)

    @property
    def beats(self) -> int:
        """Moves while a step is computed."""
        return self._cells[WORD_BEATS]

    @property
    def step_since_ns(self) -> int:
        """When the step began that is being computed; 0: none is."""
        return self._cells[WORD_STEP_SINCE]

    def _move(self, position: int) -> None:
        self.position = position
        self._at = WORD_RECORDS + RECORD_WORDS * (position % self.capacity)
        self._tag = tag_of(position)
        self._stale = tag_of(position - self.capacity) if position >= self.capacity else 0

    def poll(self, limit: int = 1 << 30) -> TokenBatch | None:
        """At most `limit` whole records in order, or None. `step` of the batch is the last record's, modulo 2^24."""
        tag = self._cells[self._at] >> 32
        if tag == self._stale:  # the idle case: nothing was written here since the last lap
            return None
        for _ in range(_FIRST_CHECKS):
            if tag != self._tag and not self._skip(tag):
                return None
            batch = self._take(limit)
            if batch is not None:
                return batch
            tag = self._cells[self._at] >> 32
            if tag in (self._tag, self._stale):  # being written
                return None
        return None

    def _skip(self, tag: int) -> bool:
        """The next record is not here: go to the oldest one that may still be whole. False: it is not written yet."""
        oldest = self._cells[WORD_HEAD] - self.capacity
        ahead = (tag - self._tag) % TAG_CYCLE
        if tag and ahead < TAG_CYCLE // 2:  # a later lap has begun to overwrite it
            oldest = max(oldest, self.position + ahead - self.capacity + 1)
        if oldest <= self.position:
            return False
        self.lost += oldest - self.position
        self._move(oldest)
        self._cells[WORD_TAIL] = oldest
        return True

    def _take(self, limit: int) -> TokenBatch | None:
        position, place = self.position, self.position % self.capacity
        count = max(1, min(limit, self._cells[WORD_HEAD] - position, self.capacity))
        upto = min(count, self.capacity - place)
        # Copied before they are judged, one u64 at a time: (words, records) is a strided read.
        words = np.empty((RECORD_WORDS, count), np.uint64)
        words[:, :upto] = self._records[place : place + upto].T
        if upto < count:
            words[:, upto:] = self._records[: count - upto].T
        whole = (words >> np.uint64(32) == _tags(self._iota, position, count)).all(axis=0)
        if not whole.all():
            count = int(whole.argmin())
            if not count:
                return None
            words = words[:, :count]
        self._move(position + count)
        self._cells[WORD_TAIL] = self.position
        return _batch(words)

    def close(self) -> None:
        """Let go of the memory (an mmap or SharedMemory cannot be closed before)."""
        del self._records
        self._cells.release()


def _batch(words: Words) -> TokenBatch:
    """Accepted records, shape (4, n), as arrays of the dtypes that TokenBatch promises."""
    low = words.astype(np.uint32)  # drops the tags
    return TokenBatch(
        (low[0] & np.uint32(0xFFFF)).view(np.int32),
        (low[0] >> np.uint32(16)).view(np.int32),
        low[1].view(np.int32),
        low[2].view(np.int32),
        low[3].astype(np.uint8),
        int(low[3, -1]) >> 8,
    )
