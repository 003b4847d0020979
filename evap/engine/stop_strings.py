"""Stop strings in a text that comes piece by piece."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence


@functools.lru_cache(maxsize=1024)
def _failure(stop: str) -> tuple[int, ...]:
    """Knuth-Morris-Pratt: length of the longest proper border of each prefix of `stop`."""
    table = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = table[k - 1]
        k += stop[i] == stop[k]
        table[i] = k
    return tuple(table)


class StopMatcher:
    """Stop strings. The one whose match ends first wins, the longer of two that end together: this does not depend on
    how the text arrives. Cost: linear in the text, whatever the stop strings are."""

    __slots__ = ("_failures", "_first", "_include", "_states", "_stops", "held", "stopped")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = sorted({s for s in stops if s}, key=len, reverse=True)
        self._failures = [_failure(s) for s in self._stops]
        self._states = [0] * len(self._stops)
        self._first = re.compile("[" + "".join(re.escape(s[0]) for s in self._stops) + "]")
        self._include = include
        self.held = ""  #: could be the start of a stop string
        self.stopped: str | None = None

    def feed(self, text: str) -> str:
        """What of the text is now certain to be shown. Not to be called again once `stopped` is set."""
        buffer = self.held + text if self.held else text
        at = len(buffer) - len(text)
        while at < len(buffer):
            if not any(self._states):
                found = self._first.search(buffer, at)
                if found is None:
                    break
                at = found.start()
            matched = self._advance(buffer[at])
            at += 1
            if matched is not None:
                self.stopped, self.held = matched, ""
                return buffer[: at if self._include else at - len(matched)]
        keep = 0 if self._include else max(self._states)
        self.held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def _advance(self, char: str) -> str | None:
        matched = None
        for n, stop in enumerate(self._stops):
            k = self._states[n]
            while k and stop[k] != char:
                k = self._failures[n][k - 1]
            if stop[k] == char:
                k += 1
                if k == len(stop):
                    matched = matched or stop
                    k = 0
            self._states[n] = k
        return matched

    @property
    def partial(self) -> bool:
        return any(self._states)
