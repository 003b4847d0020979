"""What evap's process and the engine's processes share: the token ring's memory, its doorbell, the engine's log lines.

All of it is files in one private directory (memory-backed where there is /dev/shm): the engine's processes are started
by vLLM, which passes on a configuration but no file descriptors. Nothing here imports vLLM, torch or sockets.

Doorbell: a FIFO. The engine writes one byte after it has written records; a full FIFO already wakes the reader.
Log lines: a FIFO too; one line of at most PIPE_BUF bytes is one atomic write, and a full FIFO loses lines, not time.
The same FIFO tells the engine's processes that evap's is gone, however it went: then it has no reader any more, and
they end themselves. vLLM's own would stay for ever, and keep the GPU's memory.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from evap.engine.meter import map_file
from evap.ring import format_ring, ring_bytes

Prints: TypeAlias = npt.NDArray[np.uint64]

#: Key of our settings in vLLM's `additional_config`, which reaches the scheduler and the workers.
CONFIG_KEY: Final = "evap"
RING_RECORDS: Final = 1 << 14
#: The whole KV cache, in Word.KV_USAGE.
USAGE_ONE: Final = 1 << 32
RING_FILE: Final = "ring"
BELL_FILE: Final = "bell"
USAGE_FILE: Final = "usage"
FINGERPRINT_SEED: Final = 0x9E3779B97F4A7C15
_PREFIX: Final = "evap-vllm-"
_GRACE_S: Final = 5.0
_MIX: Final = np.uint64(0xBF58476D1CE4E5B9)
_LEVELS: Final = {logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL}


def fingerprints(tokens: npt.NDArray[Any], index: npt.NDArray[Any]) -> Prints:
    """uint64 per token, from its id and its position; the sum over a generation tells which tokens stood where."""
    x = np.asarray(tokens).astype(np.uint32).astype(np.uint64) << np.uint64(32)
    x |= np.asarray(index).astype(np.uint64) & np.uint64(0xFFFF_FFFF)
    x ^= x >> np.uint64(30)
    x *= _MIX
    x ^= x >> np.uint64(27)
    return x * _MIX | np.uint64(1)


def fingerprint(tokens: list[int]) -> int:
    """The fingerprint of a whole generation."""
    total = fingerprints(np.array(tokens, np.int64), np.arange(len(tokens))).sum(dtype=np.uint64)
    return (FINGERPRINT_SEED + int(total)) & 0xFFFF_FFFF_FFFF_FFFF


class Word(enum.IntEnum):
    """What a scheduler says of its engine, a u64 each (see `usage.py`)."""

    KV_USAGE = 0  #: share of the cache that generations hold, in 1 / USAGE_ONE
    STEPS = 1  #: that have ended
    STEP_SINCE_NS = 2  #: when the one began that is being computed (CLOCK_MONOTONIC); 0: none is


class Bell:
    """The ringing end of the doorbell (in the engine's process)."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, b"!")

    def close(self) -> None:
        os.close(self._fd)


class RingFiles:
    """A token ring and its doorbell in a directory. memory: the ring's; bell_fd: the reading end, non-blocking."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.capacity = capacity
        path = folder / RING_FILE
        with path.open("wb") as file:
            file.truncate(ring_bytes(capacity))
        self.memory = map_file(path)
        format_ring(self.memory, capacity)  # ours: an engine with other code must find that out
        self.bell_fd = _fifo(folder / BELL_FILE)

    def close(self) -> None:
        """Readers of the ring must have let go of the memory."""
        os.close(self.bell_fd)
        self.memory.close()


class Usage:
    """What the engine's process says of itself (see `usage.py`), in its directory."""

    def __init__(self, folder: Path) -> None:
        self._memory = map_file(folder / USAGE_FILE)

    @property
    def kv_usage(self) -> float:
        """Share of the engine's KV cache that generations hold, as of its last step."""
        return self._word(Word.KV_USAGE) / USAGE_ONE

    @property
    def beats(self) -> int:
        """Steps that the engine has ended, also those of a prefill that gives no token yet."""
        return self._word(Word.STEPS)

    @property
    def step_since_ns(self) -> int:
        """When the step began that the engine computes; 0: none."""
        return self._word(Word.STEP_SINCE_NS)

    def _word(self, word: Word) -> int:
        return int.from_bytes(self._memory[8 * word : 8 * word + 8], sys.byteorder)

    def close(self) -> None:
        self._memory.close()


class Shared:
    """The directory, made by evap's process for one start of an engine.

    ring: the token ring and its doorbell; log_fd: reading end, non-blocking. `settings` goes to the engine. many:
    several processes use the engine, each with a ring in a directory here that is called as the nonce of its requests.
    """

    def __init__(self, *, capacity: int = RING_RECORDS, many: bool = False) -> None:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  # memory, not a place for files
        folder = Path(base or tempfile.gettempdir())
        _sweep(folder)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=folder))
        self.ring = RingFiles(self.path, capacity)
        (self.path / USAGE_FILE).write_bytes(bytes(8 * len(Word)))
        self.usage = Usage(self.path)
        self._many = many
        self.log_fd = _fifo(self.path / "log")

    @property
    def settings(self) -> dict[str, Any]:
        return {"folder": str(self.path), "capacity": self.ring.capacity, "many": self._many,
                "usage": str(self.path / USAGE_FILE)}  # fmt: skip

    def logging_file(self) -> str:
        """A logging configuration (JSON, dictConfig) with which vLLM's processes send their lines here."""
        handler: dict[str, Any] = {"()": f"{__name__}.PipeHandler", "path": str(self.path / "log"), "level": "INFO"}
        handler["owner"] = os.getpid()
        wanted = {"handlers": ["evap"], "level": "INFO", "propagate": False}
        document = {"version": 1, "disable_existing_loggers": False, "handlers": {"evap": handler}}
        path = self.path / "logging.json"
        path.write_text(json.dumps({**document, "loggers": {"vllm": wanted}}))
        return str(path)

    def close(self) -> None:
        """Remove it. Readers of the ring must have let go of the memory."""
        os.close(self.log_fd)
        self.ring.close()
        self.usage.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what processes of ours left that were killed."""
    for path in folder.glob(_PREFIX + "*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _fifo(path: Path) -> int:
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # also for writing: so it never reports the end of the file


class PipeHandler(logging.Handler):
    """Log records of a vLLM process, one JSON array [level, process, message] a line.

    In any process but `owner` (0: in none) it also watches for the owner's end, and then ends its own process.
    """

    def __init__(self, path: str, level: int | str = logging.INFO, owner: int = 0) -> None:
        super().__init__(level)
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        if owner and os.getpid() != owner:
            threading.Thread(target=_end_with_reader, args=(os.dup(self._fd),), daemon=True, name="evap-owner").start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record, 3000)
            if len(line) > select.PIPE_BUF:
                line = self._line(record, 600)
            os.write(self._fd, line)
        except (OSError, ValueError, TypeError):
            pass  # evap is gone, or does not read: nobody to tell

    def close(self) -> None:
        """Each configuration of logging closes the handlers of the last: an engine's start is one."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)
        super().close()

    def _line(self, record: logging.LogRecord, most: int) -> bytes:
        text = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            text += f" ({record.exc_info[0].__name__}: {record.exc_info[1]})"
        return json.dumps([record.levelno, record.processName, text[:most]]).encode() + b"\n"


def _end_with_reader(fd: int) -> None:
    """Wait until the FIFO has no reader; then end this process, by force if it does not go."""
    poll = select.poll()
    poll.register(fd, 0)
    poll.poll()  # POLLERR is reported whether asked for or not
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def parse_lines(data: bytes) -> list[tuple[int, str, str]]:
    """(level, process, message) per whole line; a line that is not ours is dropped."""
    found: list[tuple[int, str, str]] = []
    for line in data.splitlines():
        try:
            level, process, message = json.loads(line)
        except ValueError:
            continue
        if level in _LEVELS:
            found.append((level, str(process), str(message)))
    return found
