"""A child process: what it is given, the moment of its end, and how that is said."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

#: From a request to end until SIGKILL has done its work.
_GRACE_S: Final = 2.0
#: Longest pause before a process is started again.
MAX_PAUSE_S: Final = 30.0


def environment() -> dict[str, str]:
    """Ours, such that the child finds this very package whatever its working directory is.

    GOMP_SPINCOUNT: OpenMP threads that wait for each other spin for milliseconds by default, which takes the core from
    whoever they wait for as soon as anything else runs: with one busy process beside them on two cores a step takes 30
    times as long. With a short spin it takes twice as long, and on idle cores as long as ever.
    """
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    patience = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "2000"}
    return {**patience, **os.environ, "PYTHONPATH": path}


def start(
    module: str, arguments: Sequence[object], fds: Sequence[int], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """`python -m module ARGUMENTS`, which inherits `fds`. Raises OSError."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, pass_fds=fds, stdin=stdin, env=environment())


def pause_s(failures: int, first_s: float) -> float:
    """Until a process is started again that has failed so many times in a row: doubles from `first_s` (0 failures)."""
    return min(MAX_PAUSE_S, first_s * 2.0 ** min(failures, 20))  # a float has no room for what a night of them makes


def describe_end(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


class Child:
    """A process that the loop has started and watches. on_exit: exit status as `subprocess` gives it (negative: a
    signal), once, unless `end` was called. Raises OSError where the system starts no process."""

    def __init__(
        self, module: str, arguments: Sequence[object], fds: Sequence[int], *, on_exit: Callable[[int], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = start(module, arguments, fds)
        self._on_exit = on_exit
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        self._loop.add_reader(self._pidfd, self._ended)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """`on_exit` is called."""
        self._process.kill()

    def end(self) -> None:
        """Nobody asks any more: it has nothing to lose, and `on_exit` is not called."""
        if self._pidfd >= 0:
            self._unwatch()
            self._process.kill()
            self._process.wait(_GRACE_S)

    def _unwatch(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1

    def _ended(self) -> None:
        if self._pidfd >= 0:
            self._unwatch()
            self._on_exit(self._process.wait())
