"""Is the engine alive? It has work and makes no progress for too long: it hangs. Saturated is not hung.

Progress is what an engine has finished: tokens, steps, and inside of a step layers (`beats`) where the engine says it.
That it is in a step (`step_since_ns`) is no progress, and a process that burns CPU is none either: a dead-lock between
GPUs and an endless loop look the same. So both only say what a person wants to know first.
"""

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

    def trouble(self, now_ns: int, step_since_ns: int | None) -> str:
        """What to say while it hangs, else "". step_since_ns: when the step began that it computes; 0: it is in none,
        None: it does not say."""
        if not self.hung:
            return ""
        text = f"the engine has work and makes no progress for {(now_ns - self._since_ns) / 1e9:.0f} s"
        if step_since_ns is None:
            return text
        if step_since_ns:
            return f"{text}: in one step for {(now_ns - step_since_ns) / 1e9:.0f} s (if that is long: --hang-timeout)"
        return f"{text}: between two steps"
