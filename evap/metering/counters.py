"""The engines' own counters, joined with the accounts: one page per engine, made at the start, read at each end.

A page is written by the engine's process (or its device) right after sampling and before the tokens travel. So whoever
holds a generation's final record finds all of it there, and a token that was sampled is counted whether anybody heard
of it or not: `computed` of an account is the page's. What came through the ring or a message can be compared with it
(`final`): fewer tokens in the page than came is a fault of ours, and so are more, unless the engine died or runs ahead.

With a data directory the pages are files, and outlive a kill -9 (`Left`): in it, or on a machine with an NVIDIA GPU in
/dev/shm under the directory's device and inode, because a driver pins no page of a file that is written back to a disk.
Without one they are anonymous memory. Each start makes new files: an engine that outlives its server for a moment
writes where nobody looks any more.
An engine that writes no page (the synthetic one, whose count is the loop's own) has none here.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from evap.messages import Finish
from evap.metering import layout
from evap.metering.page import PageReader, Row, format_page, map_page_file, open_page_file

logger = logging.getLogger("evap.counters")
PREFIX: Final = "counters-"
SHM: Final = Path("/dev/shm")  # noqa: S108 - memory that outlives a process
GPU: Final = Path("/dev/nvidiactl")
#: What an engine's process imports to write its page; engines are blind to this package, so it is told them by name.
WRITERS: Final = {
    "module": "evap.metering.writer",
    "build_module": "evap.metering.build",
    "device_module": "evap.metering.cupy_reader",
}


class Counted(NamedTuple):
    """What an engine has counted for a generation: tokens, steps; when they were sampled on the loop's clock, or 0."""

    computed: int
    steps: int
    first_ns: int
    last_ns: int


class Counters:
    """The pages of a server's engines. ahead: engines may run past a stop (they schedule ahead of their results)."""

    def __init__(
        self, slots: int, engines: int, folder: Path | None, *, ahead: bool, now_ns: int, unix_ns: int,
        prefix: str = PREFIX,
    ) -> None:  # fmt: skip
        """Raises OSError. prefix: of the files' names."""
        self._prefix = prefix
        self.mismatches = 0  #: generations of which the page and the tokens that came say different things
        self._ahead, self._epoch_ns = ahead, now_ns
        self._doubts: list[tuple[int, int, int, Finish]] = []
        self._fds: list[int] = []
        self._memories: list[mmap.mmap] = []
        self._readers: list[PageReader] = []
        self.specs: list[dict[str, str]] = []  #: for each engine: what it is told
        for path in files(folder, prefix) if folder is not None else ():
            path.unlink()
        for number in range(engines):
            memory, place = self._make(folder, number, slots)
            format_page(memory, slots, epoch_device_ns=now_ns, epoch_unix_ns=unix_ns)
            self._memories.append(memory)
            self._readers.append(PageReader(memory))
            self.specs.append({**WRITERS, "page": place})

    def _make(self, folder: Path | None, number: int, slots: int) -> tuple[mmap.mmap, str]:
        if folder is not None:
            path = _homes(folder)[GPU.exists() and os.access(SHM, os.W_OK)] / f"{self._prefix}{number}"
            path.parent.mkdir(mode=0o700, exist_ok=True)
            return open_page_file(path, slots), str(path)
        fd = os.memfd_create(f"evap-{self._prefix}{number}", os.MFD_CLOEXEC)
        self._fds.append(fd)
        size = -(-layout.page_bytes(slots) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size), f"/proc/{os.getpid()}/fd/{fd}"

    def row(self, slot: int, generation: int) -> Row | None:
        """What the engine has counted for a generation by now; None if it has never run, or no page is kept."""
        for reader in self._readers:
            if reader.generation(slot) == generation and (row := reader.row(slot)) and row.generation == generation:
                return row
        return None

    def final(self, slot: int, generation: int, given: int, finish: Finish) -> Counted | None:
        """The generation's final record has come, and `given` tokens with and before it: the engine's own account.

        None where there is none. What differs, and should not, is logged and counted.
        """
        row = self.row(slot, generation)
        counted = row.computed if row is not None else 0
        if counted != given and self.progress:
            self._differ(slot, generation, counted, given, finish)
        if row is None:
            return None
        first_ns, last_ns = (self._epoch_ns + us * 1000 if us else 0 for us in (row.first_us, row.last_us))
        return Counted(max(counted, given), row.steps, first_ns, last_ns)

    def _differ(self, slot: int, generation: int, counted: int, given: int, finish: Finish) -> None:
        if counted > given and (self._ahead or finish is Finish.ERROR):
            return
        if counted < given and self._ahead:  # its worker counts beside the way of the tokens: it may be late
            self._doubts.append((slot, generation, given, finish))
        else:
            self._complain(slot, generation, counted, given, finish)

    def look_again(self) -> None:
        """About once a second: whether what was short is there by now. Slots that have a new user are let go."""
        doubts, self._doubts = self._doubts, []
        for slot, generation, given, finish in doubts:
            row = self.row(slot, generation)
            if row is not None and row.computed < given:
                self._complain(slot, generation, row.computed, given, finish)

    def _complain(self, slot: int, generation: int, counted: int, given: int, finish: Finish) -> None:
        self.mismatches += 1
        logger.error(
            "slot %d, generation %d: the engine counts %d tokens, %d came (%s)", slot, generation, counted, given,
            finish.name,
        )  # fmt: skip

    @property
    def progress(self) -> int:
        """Steps of all engines so far: a prefill that gives no token moves it, too."""
        return sum(reader.heartbeat() for reader in self._readers)

    def close(self) -> None:
        """Let go of the memory; the files stay."""
        for reader in self._readers:
            reader.close()
        for memory in self._memories:
            memory.close()
        for fd in self._fds:
            os.close(fd)
        self._readers, self._memories, self._fds = [], [], []


def _homes(folder: Path) -> tuple[Path, Path]:
    """Where the pages of a data directory may be."""
    info = folder.stat()
    return folder, SHM / f"evap-{info.st_dev:x}-{info.st_ino:x}"


def files(folder: Path, prefix: str = PREFIX) -> list[Path]:
    """The pages of a data directory."""
    return sorted(path for home in _homes(folder) for path in home.glob(prefix + "*"))


class Left:
    """Pages that a killed server's engines left. A row whose writer died in it has each count as of its last step."""

    def __init__(self, folder: Path, prefix: str = PREFIX) -> None:
        self._pages: list[tuple[Any, PageReader]] = []
        for path in files(folder, prefix):
            try:
                memory = map_page_file(path)[0]
            except (OSError, ValueError) as error:
                logger.warning("%s is no counters page that can be read: %s", path, error)
                continue
            self._pages.append((memory, PageReader(memory)))

    def row(self, slot: int, generation: int) -> Row | None:
        for _, reader in self._pages:
            row = reader.last_row(slot)
            if row is not None and row.generation == generation:
                times = {name: reader.unix_ns(getattr(row, name)) // 1000 for name in ("first_us", "last_us")}
                return row._replace(**times) if row.computed else row
        return None

    def close(self) -> None:
        for memory, reader in self._pages:
            reader.close()
            memory.close()


FindRow = Callable[[int, int], Row | None]
