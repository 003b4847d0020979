"""A loop process as its parent sees it: one life, from its start to the moment its end has been reported."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from evap import between
from evap.engine.child import environment


class Child:
    """on_message: what it says. on_exit: exit status as `subprocess` gives it, once; its pipe has been read before."""

    def __init__(
        self, start: between.Start, fds: Sequence[int], *,
        on_message: Callable[[Child, between.FromChild], None], on_exit: Callable[[Child, int], None],
    ) -> None:  # fmt: skip
        self.number = start.number
        self.up: between.Up | None = None
        self._loop = asyncio.get_running_loop()
        self.started_s = self._loop.time()
        self._on_exit = on_exit
        ours, theirs = between.pair()
        command = [sys.executable, "-m", "evap.loop_process", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno(), *fds], stdin=subprocess.DEVNULL, env=environment()
        )
        theirs.close()
        self.pipe = between.Pipe(
            ours, msgspec.msgpack.Decoder(between.FromChild),
            on_message=lambda message, _fds: on_message(self, message), on_end=lambda: None,
        )  # fmt: skip
        self.pipe.send(start)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, number: signal.Signals) -> None:
        """SIGTERM (once: drain; again: end) or SIGHUP."""
        self.pipe.send(between.Signal(number))

    def kill(self) -> None:
        self._process.kill()

    def _exited(self) -> None:
        status = self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.pipe.close()
        self._on_exit(self, status)
