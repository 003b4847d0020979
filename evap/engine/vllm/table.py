"""Where a process's running requests stand, so that the host of the engine can end them when that process is gone.

An array of generations (-1: none) and one of request numbers, by slot, and the process's nonce: what request ids are
made of (`ids.py`). In the memory of one process, or shared with the host.
"""

from __future__ import annotations

import mmap
import os
import secrets
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from evap.engine.vllm import ids
from evap.messages import Int32

SLOTS: Final = 1 << 16
_NONCE_BYTES: Final = 64  # of which 6 are used
SIZE: Final = _NONCE_BYTES + 8 * SLOTS


class Table:
    """memory: of SIZE bytes, zeroed or of another process's table; None: our own. Whoever submits calls `begin`."""

    def __init__(self, memory: Any = None) -> None:
        self._memory = memory if memory is not None else bytearray(SIZE)
        #: slot -> generation, -1: none
        self.live: Int32 = np.frombuffer(self._memory, np.int32, SLOTS, _NONCE_BYTES)
        #: slot -> number of its last request
        self.number: npt.NDArray[np.uint32] = np.frombuffer(
            self._memory, np.uint32, SLOTS, _NONCE_BYTES + 4 * SLOTS
        )  # fmt: skip

    def begin(self) -> str:
        """Nothing runs. Returns the nonce of all ids from here on."""
        self.live[:] = -1
        nonce = secrets.token_hex(3)
        self._memory[:6] = nonce.encode()
        return nonce

    @property
    def nonce(self) -> str:
        """ "" before somebody has begun."""
        return bytes(self._memory[:6]).strip(b"\0").decode()

    def ids(self) -> list[str]:
        """Of all requests that run."""
        nonce = self.nonce
        if not nonce:
            return []
        slots = np.flatnonzero(self.live >= 0)
        rows = zip(self.number[slots].tolist(), slots.tolist(), self.live[slots].tolist(), strict=True)
        return [ids.make(nonce, *row) for row in rows]


def make_memory() -> int:
    """A descriptor of memory for a table that two processes share."""
    fd = os.memfd_create("evap-vllm-requests", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    return fd


def open_table(fd: int) -> Table:
    """Takes the descriptor."""
    try:
        return Table(mmap.mmap(fd, SIZE))
    finally:
        os.close(fd)
