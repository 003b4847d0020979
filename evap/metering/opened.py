"""Open exchanges, and those that are not in the ledger yet, in a mapped file: what survives kill -9.

Per token nothing is written here that would not be written anyway: `computed`, `lag` and `cached` are arrays by slot,
and the loop's own count of computed tokens *is* the first of them. An exchange that is on rows has delivered all that
was computed; where that is not so (text held back, a slow reader) `lag` says by how much. Per exchange a few numbers
are packed: at its start, at its end, and where it gives slots back before its end.

`computed` counts what came to the loop. What an engine in another process has sampled is in its counters page, by slot
and generation; `recover` takes the higher of both, so that no token is lost that was on its way.

    byte 0      magic, slots, entries (u64 each)
    byte 64     owner, computed, lag, cached, generation: int32 by slot; owner: the entry of the slot's exchange, or -1
    then        entries, ENTRY_BYTES each: u32 phase (FREE, OPEN, SETTLED), i32 the slot whose counts `base` has taken
                over last, u32 base computed, emitted, delivered, cached, u32 flags, u16 length of the note; the note;
                what is settled of it, once it is

The page cache keeps the file when the process dies. One writer, the loop of one process; it is read when nobody writes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from evap.metering.counters import FindRow
from evap.metering.record import Record

Int32 = npt.NDArray[np.int32]

MAGIC: Final = int.from_bytes(b"EVAPOPN2", "little")
ENTRY_BYTES: Final = 896
_PHASES_EACH: Final = ENTRY_BYTES // 4
_START: Final = 64
_HEADER: Final = struct.Struct("<QQQ")
_ENTRY: Final = struct.Struct("<IiIIIIIHxx")
_FINAL: Final = struct.Struct("<QQQIIIIIIHB32s")
_NOTE_AT: Final = _ENTRY.size
_FINAL_AT: Final = 800
_BASE: Final = struct.Struct("<iIIII")  # from byte 4 of an entry
_DELIVERED: Final = struct.Struct("<I")
MAX_NOTE_BYTES: Final = _FINAL_AT - _NOTE_AT
_FREE: Final = 0
_OPEN: Final = 1
_SETTLED: Final = 2
_NOTHING: Final = (0, 0, 0, 0)
_BY_SLOT: Final = 5  # arrays
_OWNER: Final = 0
_COMPUTED: Final = 1
USED_UP: Final = "used up"
_WHOLE: Final = 1  #: nothing is delivered before the end
#: Heads of new entries, ready-made, by whether they are whole and the length of the note.
_HEADS: Final = [
    [_ENTRY.pack(_OPEN, -1, 0, 0, 0, 0, flags, size) for size in range(MAX_NOTE_BYTES + 1)] for flags in (0, _WHOLE)
]


class Survivor(NamedTuple):
    """An exchange that was open, or not in the ledger yet (then `final` is there), when its process died.

    final: its record without what the note says; of its operation only USED_UP, if it has used it up.
    first_us, last_us, steps: of its tokens, as the engine's page has them; 0 if there is none.
    """

    note: bytes
    cached: int
    computed: int
    emitted: int
    delivered: int
    first_us: int = 0
    last_us: int = 0
    steps: int = 0
    final: Record | None = None


class OpenTable:
    """The loop's side: one writer."""

    def __init__(self, path: Path, slots: int, entries: int) -> None:
        """An empty table, its blocks allocated now. Raises OSError."""
        at, size = _places(slots, entries)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._at = at
        arrays = _arrays(self._memory, slots)
        arrays[_OWNER] = -1
        self.computed = arrays[_COMPUTED]
        # Single numbers go through memoryviews: numpy takes twice as long for one.
        cells = memoryview(self._memory)[_START : _START + 4 * _BY_SLOT * slots].cast("i")
        self.owner, _, self.lag, self.cached, self.generation = (
            cells[n * slots : (n + 1) * slots] for n in range(_BY_SLOT)
        )
        self._phases = memoryview(self._memory)[at:].cast("i")
        self._slots: list[Sequence[int]] = [()] * entries
        self._bases: dict[int, tuple[int, int, int, int]] = {}  # of those that have given slots back
        self._free = list(range(entries))
        self._entries = entries
        self._margin = entries // 16
        _HEADER.pack_into(self._memory, 0, MAGIC, slots, entries)

    @property
    def full(self) -> bool:
        """There is no room, but for those that are on their way here."""
        return len(self._free) <= self._margin

    def open(self, note: bytes, slots: Sequence[int], *, whole: bool, generations: Sequence[int] = ()) -> int:
        """Enter an exchange that takes these slots; its entry. -1 when the table is full or the note too long.

        generations: of the slots, where an engine's page tells them apart.
        """
        size = len(note)
        if not self._free or size > MAX_NOTE_BYTES:
            return -1
        entry = self._free.pop()
        self._slots[entry] = slots
        owner, lag, cached = self.owner, self.lag, self.cached
        for slot in slots:
            lag[slot] = cached[slot] = 0
            owner[slot] = entry
        if generations:
            for slot, generation in zip(slots, generations, strict=True):
                self.generation[slot] = generation
        at = self._at + entry * ENTRY_BYTES
        # In one go: it has no token yet, so nothing is lost when the process dies within it.
        self._memory[at : at + _NOTE_AT + size] = _HEADS[whole][size] + note
        return entry

    def released(self, entry: int, slot: int, computed: int, emitted: int, delivered: int) -> None:
        """The slot's counts are final, and are kept with the exchange from now on."""
        old = self._bases.get(entry, _NOTHING)
        cached = max(old[3], self.cached[slot])
        base = self._bases[entry] = (old[0] + computed, old[1] + emitted, old[2] + delivered, cached)
        # A process that dies here has the counts in both places; `slot` says so.
        _BASE.pack_into(self._memory, self._at + entry * ENTRY_BYTES + 4, slot, *base)
        self.owner[slot] = -1

    def delivered(self, entry: int, tokens: int) -> None:
        """What an exchange without slots has delivered by now: its reader is slow."""
        computed, emitted, _, cached = self._bases.get(entry, _NOTHING)
        self._bases[entry] = (computed, emitted, tokens, cached)
        _DELIVERED.pack_into(self._memory, self._at + entry * ENTRY_BYTES + 16, tokens)

    def settle(self, entries: Sequence[int], records: Sequence[Record]) -> None:
        """These are over; the entry of each (-1: it has none)."""
        memory, start, phases, owner, bases = self._memory, self._at + _FINAL_AT, self._phases, self.owner, self._bases
        for entry, record in zip(entries, records, strict=True):
            if entry < 0:
                continue
            _FINAL.pack_into(
                memory, start + entry * ENTRY_BYTES, record.first_us, record.last_us, record.settled_us, record.cached,
                record.computed, record.emitted, record.delivered, record.billable, record.steps, record.status,
                record.operation != "", _end(record.end),
            )  # fmt: skip
            phases[entry * _PHASES_EACH] = _SETTLED
            for slot in self._slots[entry]:
                if owner[slot] == entry:
                    owner[slot] = -1
            if bases:
                bases.pop(entry, None)

    def free(self, entries: Sequence[int]) -> None:
        """Their records are durable. May be called from another thread than the loop's."""
        phases = self._phases
        for entry in entries:
            phases[entry * _PHASES_EACH] = _FREE
        self._free.extend(entries)

    @property
    def crowded(self) -> bool:
        """More than half of the entries are taken."""
        return len(self._free) * 2 < self._entries

    def release(self) -> None:
        """Let go of the memory."""
        del self.owner, self.computed, self.lag, self.cached, self.generation, self._phases
        self._memory.close()


@lru_cache(256)
def _end(end: str) -> bytes:
    return end.encode()[:32]


def _places(slots: int, entries: int) -> tuple[int, int]:
    """(first byte of the entries, size of the file)."""
    at = _START + 4 * _BY_SLOT * slots
    at += -at % 64
    return at, at + entries * ENTRY_BYTES


def _arrays(memory: Any, slots: int) -> Int32:
    return np.frombuffer(memory, "<i4", _BY_SLOT * slots, _START).reshape(_BY_SLOT, slots)


def recover(path: Path, find: FindRow = lambda slot, generation: None) -> list[Survivor]:
    """What was open when the table's process died; [] for a file that is missing or none of ours.

    find: the row of a (slot, generation) in what the engines left, its stamps in us since 1970.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    if len(data) < _START:
        return []
    magic, slots, entries = _HEADER.unpack_from(data)
    if magic != MAGIC or len(data) < _places(slots, entries)[1]:
        return []
    start = _places(slots, entries)[0]
    owner, computed, lag, cached, generation = _arrays(data, slots)
    found = []
    for entry in range(entries):
        at = start + entry * ENTRY_BYTES
        phase, taken, *base, flags, size = _ENTRY.unpack_from(data, at)
        if phase not in (_OPEN, _SETTLED):
            continue
        note = data[at + _NOTE_AT : at + _NOTE_AT + size]
        if phase != _OPEN:
            final = _final(data, at + _FINAL_AT)
            found.append(Survivor(note, final.cached, final.computed, final.emitted, final.delivered, final=final))
            continue
        own = np.flatnonzero(owner == entry)
        running = own[own != taken]
        counted = int(computed[running].sum())
        out = 0 if flags & _WHOLE else counted - int(lag[running].sum())
        pairs = [(slot, find(slot, int(generation[slot]))) for slot in running.tolist()]
        rows = [row for _, row in pairs if row is not None]
        sampled = sum(max(int(computed[slot]), row.computed if row is not None else 0) for slot, row in pairs)
        times = [row for row in rows if row.computed]
        found.append(
            Survivor(
                note=note, cached=max(base[3], int(cached[own].max(initial=0)), *(row.cached for row in rows)),
                computed=base[0] + sampled, emitted=base[1] + counted, delivered=base[2] + max(0, out),
                first_us=min((row.first_us for row in times), default=0),
                last_us=max((row.last_us for row in times), default=0),
                steps=max((row.steps for row in rows), default=0),
            )
        )  # fmt: skip
    return found


def _final(data: bytes, at: int) -> Record:
    first_us, last_us, settled_us, cached, computed, emitted, delivered, billable, steps, status, used_up, end = (
        _FINAL.unpack_from(data, at)
    )
    return Record(
        "", "", USED_UP if used_up else "", "", 0, first_us, last_us, settled_us, 0, cached, computed, emitted,
        delivered, billable, steps, 0, status, end.rstrip(b"\0").decode(errors="replace"),
    )  # fmt: skip
