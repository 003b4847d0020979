"""Engines start one after the other."""

from __future__ import annotations

import os
import threading
from typing import Final

#: Engines start one after the other up to the point where their processes exist: vLLM reads its settings of logging
#: and devices from this process's environment.
_TURN: Final = threading.Lock()


class Turn:
    """Holds _TURN from `begin` (in a thread) to `end` (from anywhere, any number of times)."""

    def __init__(self) -> None:
        self._held = False
        self._before: dict[str, str | None] = {}

    def begin(self) -> None:
        _TURN.acquire()
        self._held = True

    def put(self, name: str, value: str) -> None:
        """A variable of the environment for this start's processes; it is as it was when the turn ends."""
        self._before.setdefault(name, os.environ.get(name))
        os.environ[name] = value

    def end(self) -> None:
        if self._held:
            self._held = False
            while self._before:
                name, value = self._before.popitem()
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            _TURN.release()
