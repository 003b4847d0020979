"""Engines start one after the other."""

from __future__ import annotations

import threading
from typing import Final

#: Engines start one after the other up to the point where their processes exist: vLLM reads its settings of logging
#: and devices from this process's environment.
_TURN: Final = threading.Lock()


class Turn:
    """Holds _TURN from `begin` (in a thread) to `end` (from anywhere, any number of times)."""

    def __init__(self) -> None:
        self._held = False

    def begin(self) -> None:
        _TURN.acquire()
        self._held = True

    def end(self) -> None:
        if self._held:
            self._held = False
            _TURN.release()
