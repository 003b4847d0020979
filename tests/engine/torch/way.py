"""The loop's ends of a way to an engine, and the engine's, for tests that are both."""

from __future__ import annotations

import mmap
import os
import socket

from evap.engine.torch import wire
from evap.ring import RingReader, ring_bytes
from tests.engine.test_supervisor import PATIENCE_S


class Way:
    """A socket pair, a ring of `capacity` records, and a doorbell. The ring's writer formats it."""

    def __init__(self, capacity: int) -> None:
        self.sock, self.theirs = socket.socketpair()
        self.sock.settimeout(PATIENCE_S)
        self.memory = os.memfd_create("test-ring")
        os.ftruncate(self.memory, ring_bytes(capacity))
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.ring = RingReader(mmap.mmap(self.memory, ring_bytes(capacity)), capacity)
        self._frames = wire.from_worker()
