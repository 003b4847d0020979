"""How much prefill a step may hold, from how long steps take. Pure Python; readings come from outside.

A step is what a cancel, a new request and every other stream's next token wait for. On a GPU the configured chunk is
quick; on a CPU it may take a second, and a quarter of it has the same throughput.
"""

from __future__ import annotations

from typing import Final

#: A step with prefill should not take longer.
TARGET_NS: Final = 100_000_000
#: Smaller chunks would mostly re-read the weights.
LEAST: Final = 64


class Pacer:
    """`budget` moves half-way to what would have met the target; between LEAST and `most`."""

    def __init__(self, most: int, target_ns: int = TARGET_NS) -> None:
        self._most = most
        self._least = min(LEAST, most)
        self._target_ns = target_ns
        self.budget = most

    def took(self, cost: float, elapsed_ns: int) -> None:
        """A step of this cost (in tokens, as the scheduler counts) took so long. Only ask for steps full of prefill."""
        if cost > 0 and elapsed_ns > 0:
            right = cost * self._target_ns / elapsed_ns
            self.budget = int(max(self._least, min(self._most, (self.budget + right) / 2)))
