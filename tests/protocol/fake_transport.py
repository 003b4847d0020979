"""A transport without a socket: what was written, what was paused, how it was closed."""

from __future__ import annotations

import asyncio
from typing import Any


class FakeTransport(asyncio.Transport):
    """`holds` is what its write buffer is said to contain; `written` everything it was given."""

    def __init__(self, protocol: asyncio.Protocol, **extra: Any) -> None:
        super().__init__({"peername": ("192.0.2.1", 4711), **extra})
        self.protocol = protocol
        self.written = bytearray()
        self.writes = 0
        self.holds = 0
        self.reading = True
        self.closed = False
        self.aborted = False
        self.eof_written = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += data
        self.writes += 1

    def get_write_buffer_size(self) -> int:
        return self.holds

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = (high, low)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof_written = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True
