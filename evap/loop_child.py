"""A loop process as its parent sees it: one life, from its start to the moment its end has been reported."""

from __future__ import annotations

import mmap
import signal
from collections.abc import Callable, Sequence

import msgspec

from evap import between
from evap.pipe import PipedChild


class Child(PipedChild[between.FromChild]):
    """on_message: what it says. on_exit: once, after its pipe has been read."""

    def __init__(
        self, start: between.Start, fds: Sequence[int], *,
        on_message: Callable[[Child, between.FromChild], None], on_exit: Callable[[Child, int], None],
    ) -> None:  # fmt: skip
        super().__init__(
            "evap.loop_process", msgspec.msgpack.Decoder(between.FromChild), fds,
            on_message=lambda message, _fds: on_message(self, message),
            on_exit=lambda status: on_exit(self, status), on_end=lambda: None,
        )  # fmt: skip
        self.number = start.number
        self.up: between.Up | None = None
        self.tally: mmap.mmap  #: its counters, also when it is dead
        self.started_s = self._loop.time()
        self.pipe.send(start)

    def tell(self, number: signal.Signals) -> None:
        """SIGTERM (once: drain; again: end) or SIGHUP."""
        self.pipe.send(between.Signal(number))
