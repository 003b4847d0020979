"""Engines start one after the other, and leave the environment as they found it."""

from __future__ import annotations

import os
import threading
from typing import Final

from evap.errors import StartupError

#: Engines start one after the other up to the point where their processes exist: vLLM reads its settings of logging
#: and devices from this process's environment.
_TURN: Final = threading.Lock()


class Turn:
    """Holds _TURN from `begin` (in a thread) to `end` (from anywhere, any number of times).

    A start that is cancelled cannot take its thread along: the thread finds that out here. Raises StartupError then.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = self._over = False
        self._before: dict[str, str | None] = {}

    def begin(self) -> None:
        _TURN.acquire()
        with self._guard:
            self._held = not self._over
        if not self._held:
            _TURN.release()
            raise _stopped()

    def put(self, name: str, value: str) -> None:
        """A variable of the environment for this start's processes; it is as it was when the turn ends."""
        with self._guard:
            if not self._held:
                raise _stopped()
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def end(self) -> None:
        with self._guard:
            self._over, held, self._held = True, self._held, False
            while self._before:
                name, value = self._before.popitem()
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        if held:
            _TURN.release()


def _stopped() -> StartupError:
    return StartupError("stopped while starting")
