"""The counters page in memory that the host can see: making it, reading it, and the loop's own rows and notes.

The engine's rows come from `writer.py` or from the device. Reading is safe at any moment, in any process that maps the
page: a line whose eight tags differ is being written, and is looked at again. See `layout.py`.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from evap.metering import layout

Words: TypeAlias = npt.NDArray[np.uint64]
_LOOKS: Final = 64
_VALUE: Final = np.uint64(layout.VALUE_MASK)
_VALUE_BITS: Final = np.uint64(layout.VALUE_BITS)
_LINE: Final = struct.Struct(f"{layout.LINE_WORDS}Q")  # native: one load a word
_NOTE_HEAD: Final = 8  # crc32 of the rest, u16 generation, u16 length
MAX_NOTE_BYTES: Final = layout.NOTE_BYTES - _NOTE_HEAD


class StepLine(NamedTuple):
    """The engine's heartbeat and totals; fields as layout.STEP_FIELDS."""

    step: int
    records: int
    computed: int
    emitted: int
    begin_us: int
    end_us: int
    busy_us: int
    rows: int


class Row(NamedTuple):
    """What the engine counted for a slot; fields as layout.ROW_FIELDS, `state` taken apart."""

    generation: int
    finish: int
    prompt: int
    cached: int
    computed: int
    emitted: int
    first_us: int
    last_us: int
    steps: int


class HostRow(NamedTuple):
    """What the loop counted for a slot; fields as layout.HOST_FIELDS, `state` taken apart."""

    generation: int
    phase: int
    emitted: int
    delivered: int
    opened_us: int
    closed_us: int


class Survivor(NamedTuple):
    """A slot that was open when its process died. row: None if the engine never wrote one of this generation."""

    slot: int
    note: bytes
    host: HostRow
    row: Row | None


def open_page_file(path: Path, slots: int) -> mmap.mmap:
    """A zeroed, shared page file, its blocks allocated now (a full disk raises OSError here, not SIGBUS later)."""
    size = -(-layout.page_bytes(slots) // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def map_page_file(path: Path) -> tuple[mmap.mmap, int]:
    """An existing page file and its slots. Raises ValueError when it is none, OSError when it cannot be read."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return memory, page_slots(memory)


def format_page(memory: Any, slots: int, *, epoch_device_ns: int, epoch_unix_ns: int, nonce: int = 0) -> None:
    """Make writable memory an empty page. The epochs are readings of both clocks at the same moment: time zero."""
    words = _words(memory, layout.page_bytes(slots) // 8)
    words[:] = 0
    words[layout.WORD_SHAPE] = layout.PAGE_VERSION << 32 | slots
    words[layout.WORD_EPOCH_DEVICE_NS] = epoch_device_ns
    words[layout.WORD_EPOCH_UNIX_NS] = epoch_unix_ns
    words[layout.WORD_NONCE] = nonce
    words[layout.WORD_MAGIC] = layout.PAGE_MAGIC


def page_slots(memory: Any) -> int:
    """Slots of a page. Raises ValueError for memory that is no page of this version, or too short for it."""
    view = memoryview(memory).cast("B")
    if view.nbytes < layout.WORD_ROWS * 8:
        raise ValueError("this memory is too short for a counters page")
    words = view[: layout.WORD_ROWS * 8].cast("Q")
    if words[layout.WORD_MAGIC] != layout.PAGE_MAGIC:
        raise ValueError("this memory is not a counters page")
    version, slots = divmod(words[layout.WORD_SHAPE], 1 << 32)
    if version != layout.PAGE_VERSION:
        raise ValueError(f"counters page of version {version}, expected {layout.PAGE_VERSION}")
    if view.nbytes < layout.page_bytes(slots):
        raise ValueError(f"a counters page of {slots} slots needs {layout.page_bytes(slots)} bytes, not {view.nbytes}")
    return slots


def _words(memory: Any, count: int) -> Words:
    view = memoryview(memory).cast("B")
    if view.nbytes < count * 8:
        raise ValueError(f"{count * 8} bytes are needed, not {view.nbytes}")
    words: Words = np.frombuffer(view, dtype="<u8", count=count)
    if not words.flags.aligned:
        raise ValueError("page memory must be aligned to 8 bytes")
    return words


class PageReader:
    """Looks at a page, from any process. Times are in us since the page's time zero (see `unix_ns`)."""

    def __init__(self, memory: Any) -> None:
        self.slots = page_slots(memory)
        self._memory = memoryview(memory).cast("B")[: layout.page_bytes(self.slots)]
        self._cells = self._memory.cast("Q")
        self._table = _words(memory, len(self._cells))
        self._host = layout.host_rows_word(self.slots)

    @property
    def nonce(self) -> int:
        return self._cells[layout.WORD_NONCE]

    def unix_ns(self, us: int) -> int:
        """Unix time of a stamp of this page."""
        return self._cells[layout.WORD_EPOCH_UNIX_NS] + us * 1000

    def heartbeat(self) -> int:
        """Steps so far: one load, also while the step line is being written."""
        return self._cells[layout.WORD_STEP_LINE] & layout.VALUE_MASK

    def step_line(self) -> StepLine | None:
        """None before the first step (or if the writer died in the middle of a line)."""
        line = self._line(layout.WORD_STEP_LINE)
        return StepLine(*line) if line is not None else None

    def row(self, slot: int) -> Row | None:
        """The engine's row; None if it was never written (or the writer died in the middle of it)."""
        return self._row(slot, self._line)

    def last_row(self, slot: int) -> Row | None:
        """The row when nobody writes any more. If its writer died in it, counts are as of its last step or before."""
        return self._row(slot, self._dead_line)

    def generation(self, slot: int) -> int:
        """The generation that the row is of, in one load; 0 also for a row that was never written."""
        return self._cells[layout.WORD_ROWS + slot * layout.LINE_WORDS] & 0xFFFF

    def host_row(self, slot: int) -> HostRow | None:
        return self._host_row(slot, self._line)

    def _row(self, slot: int, read: Callable[[int], list[int] | None]) -> Row | None:
        line = read(layout.WORD_ROWS + slot * layout.LINE_WORDS)
        return Row(line[0] & 0xFFFF, line[0] >> 16 & 0xFF, *line[1:]) if line is not None else None

    def _host_row(self, slot: int, read: Callable[[int], list[int] | None]) -> HostRow | None:
        line = read(self._host + slot * layout.LINE_WORDS)
        return HostRow(line[0] & 0xFFFF, line[0] >> 16 & 0xFF, *line[1:5]) if line is not None else None

    def _line(self, at: int) -> list[int] | None:
        for _ in range(_LOOKS):
            words = _LINE.unpack_from(self._memory, at * 8)
            tag = min(words) >> layout.VALUE_BITS  # the tag is on top: if the least and the most agree, all do
            if tag == max(words) >> layout.VALUE_BITS:
                return [w & layout.VALUE_MASK for w in words] if tag else None
        return None

    def _dead_line(self, at: int) -> list[int] | None:
        """A line nobody writes any more. Where its writer died in it, each count is as of the last step or before."""
        words = self._cells[at : at + layout.LINE_WORDS].tolist()
        tag = words[0] >> layout.VALUE_BITS
        return [w & layout.VALUE_MASK for w in words] if tag else None

    def rows(self) -> tuple[Words, npt.NDArray[np.bool_]]:
        """All engine rows at once: values, shape (slots, 8), columns as layout.ROW_FIELDS; and which rows are whole.

        A row that is not whole was never written or is being written: keep what an earlier look gave.
        """
        table = self._table[layout.WORD_ROWS : self._host].reshape(self.slots, layout.LINE_WORDS)
        words = np.ascontiguousarray(table.T)  # one u64 at a time: the read is strided
        tags = words >> _VALUE_BITS
        return (words & _VALUE).T, (tags == tags[0]).all(axis=0) & (tags[0] > 0)

    def note(self, slot: int, generation: int) -> bytes | None:
        """The note that was left when the slot was taken; None if it is another generation's or not whole."""
        at = layout.notes_byte(self.slots) + slot * layout.NOTE_BYTES
        data = bytes(self._memory[at : at + layout.NOTE_BYTES])
        size = int.from_bytes(data[6:8], "little")
        if size > MAX_NOTE_BYTES or crc32(data[4 : _NOTE_HEAD + size]) != int.from_bytes(data[:4], "little"):
            return None
        if int.from_bytes(data[4:6], "little") != generation:
            return None
        return data[_NOTE_HEAD : _NOTE_HEAD + size]

    def survivors(self) -> list[Survivor]:
        """What was open, for settling after a crash: only when no process writes the page any more."""
        found = []
        for slot in range(self.slots):
            host = self._host_row(slot, self._dead_line)
            if host is None or host.phase != layout.PHASE_OPEN:
                continue
            note, row = self.note(slot, host.generation), self._row(slot, self._dead_line)
            if note is not None:
                found.append(Survivor(slot, note, host, row if row and row.generation == host.generation else None))
        return found

    def close(self) -> None:
        """Let go of the memory."""
        del self._table
        self._cells.release()
        self._memory.release()


class HostRows:
    """The loop's side of a page: which slots are open, for whom, and what left evap. One writer."""

    def __init__(self, memory: Any) -> None:
        self.slots = page_slots(memory)
        self._memory = memoryview(memory).cast("B")[: layout.page_bytes(self.slots)]
        at = layout.host_rows_word(self.slots)
        words = _words(memory, layout.page_bytes(self.slots) // 8)
        self._lines = words[at : at + self.slots * layout.LINE_WORDS].reshape(self.slots, layout.LINE_WORDS)
        # One after next: whatever a predecessor left half-written carries neither.
        self._tags = (self._lines[:, 0] >> _VALUE_BITS).astype(np.int64) % layout.LINE_TAGS + 1
        self._values = self._lines & _VALUE

    def open(self, slot: int, generation: int, now_us: int, note: bytes) -> None:
        """Take a slot. `note`, at most MAX_NOTE_BYTES, says whose it is; it is there before the slot counts as open.

        Raises ValueError for a longer note.
        """
        if len(note) > MAX_NOTE_BYTES:
            raise ValueError(f"a note has at most {MAX_NOTE_BYTES} bytes")
        body = generation.to_bytes(2, "little") + len(note).to_bytes(2, "little") + note
        at = layout.notes_byte(self.slots) + slot * layout.NOTE_BYTES
        self._memory[at : at + 4 + len(body)] = crc32(body).to_bytes(4, "little") + body
        self._values[slot] = (generation | layout.PHASE_OPEN << 16, 0, 0, now_us, 0, 0, 0, 0)
        self._publish(np.array([slot]))

    def count(self, slots: npt.NDArray[Any], emitted: npt.NDArray[Any], delivered: npt.NDArray[Any]) -> None:
        """Totals so far of several slots (each at most once), in tokens."""
        self._values[slots, 1] = emitted
        self._values[slots, 2] = delivered
        self._publish(slots)

    def close(self, slot: int, now_us: int) -> None:
        """The slot's exchange is settled durably: a successor need not look at it."""
        values = self._values[slot]
        values[0] = int(values[0]) & 0xFFFF | layout.PHASE_SETTLED << 16
        values[4] = now_us
        self._publish(np.array([slot]))

    def _publish(self, slots: npt.NDArray[Any]) -> None:
        tags = self._tags[slots] % layout.LINE_TAGS + 1
        self._tags[slots] = tags
        words = self._values[slots] | tags.astype(np.uint64)[:, None] << _VALUE_BITS
        for column in reversed(range(layout.LINE_WORDS)):
            self._lines[slots, column] = words[:, column]

    def release(self) -> None:
        """Let go of the memory."""
        del self._lines
        self._memory.release()
