"""Is the engine alive? It has work and makes no progress for too long: it hangs. Saturated is not hung."""

from __future__ import annotations


class Heartbeat:
    """`look` from time to time, at least twice per timeout. timeout_ns 0: never hung."""

    def __init__(self, timeout_ns: int) -> None:
        self.timeout_ns = timeout_ns
        self.hung = False
        self._progress = -1
        self._since_ns = 0

    def look(self, progress: int, *, working: bool, now_ns: int) -> bool:
        """progress: anything that changes when the engine does something. True when `hung` has changed."""
        if not working or progress != self._progress:
            self._progress, self._since_ns = progress, now_ns
        was, self.hung = self.hung, bool(self.timeout_ns) and now_ns - self._since_ns >= self.timeout_ns
        return was != self.hung
