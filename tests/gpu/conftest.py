"""Tests that need a CUDA device and CuPy: `python -m pytest tests/gpu`. Elsewhere they are skipped, with the reason."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evap.metering import cupy_reader, layout
from evap.metering.page import format_page
from evap.ring import WORD_HEAD, WORD_TAIL, ring_bytes

REASON = cupy_reader.unavailable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if REASON:
                item.add_marker(pytest.mark.skip(reason=REASON))


class Shared:
    """A file in /dev/shm that holds a page and, from a page boundary on, a ring; mapped into the device."""

    def __init__(self, path: Path, slots: int, capacity: int) -> None:
        self.path, self.slots, self.capacity = path, slots, capacity
        self.ring_at = -(-layout.page_bytes(slots) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self.ring_at + -(-ring_bytes(capacity) // mmap.PAGESIZE) * mmap.PAGESIZE
        path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), size)
        view = memoryview(self.memory)
        self.page, self.ring = view[: self.ring_at], view[self.ring_at :]
        epoch = int(cupy_reader.device_clock_ns()[0])
        format_page(self.page, slots, epoch_device_ns=epoch, epoch_unix_ns=0)
        self.pinned = cupy_reader.PinnedMemory(self.memory)

    def meter(self) -> Any:
        pointer = self.pinned.device_pointer
        return cupy_reader.DeviceMeter(self.page, pointer, self.ring, pointer + self.ring_at, self.capacity)

    def drained(self) -> bool:
        """The reader has taken every record."""
        words = self.ring.cast("Q")
        return bool(words[WORD_HEAD] == words[WORD_TAIL])

    def close(self) -> None:
        self.pinned.close()
        self.path.unlink()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    made = Shared(Path("/dev/shm") / f"evap-test-{os.getpid()}", slots=1024, capacity=1 << 14)
    yield made
    made.close()
