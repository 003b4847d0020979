"""The counters page in memory that the host can see: making it, and reading it.

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

import numpy as np
import numpy.typing as npt

from evap.metering import layout

Words: TypeAlias = npt.NDArray[np.uint64]
_LOOKS: Final = 64
_VALUE: Final = np.uint64(layout.VALUE_MASK)
_VALUE_BITS: Final = np.uint64(layout.VALUE_BITS)
_LINE: Final = struct.Struct(f"{layout.LINE_WORDS}Q")  # native: one load a word


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

    def _row(self, slot: int, read: Callable[[int], list[int] | None]) -> Row | None:
        line = read(layout.WORD_ROWS + slot * layout.LINE_WORDS)
        return Row(line[0] & 0xFFFF, line[0] >> 16 & 0xFF, *line[1:]) if line is not None else None

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
        table = self._table[layout.WORD_ROWS :].reshape(self.slots, layout.LINE_WORDS)
        words = np.ascontiguousarray(table.T)  # one u64 at a time: the read is strided
        tags = words >> _VALUE_BITS
        return (words & _VALUE).T, (tags == tags[0]).all(axis=0) & (tags[0] > 0)

    def close(self) -> None:
        """Let go of the memory."""
        del self._table
        self._cells.release()
        self._memory.release()
