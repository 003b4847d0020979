"""Histograms that are fed with a list append or two per engine step, and counted by numpy when somebody looks.

`Histogram`: observations by upper bound, as Prometheus has them. `SharedHistogram`: the same, outliving the process.
`Gaps`: times between the tokens of a generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: observations that wait to be counted, at most; counting so many takes some 50 us
FOLD: Final = 1000
#: "this generation has had no token": what is counted from here on is dropped
_NEVER: Final = -(1 << 62)
_TOO_LONG: Final = 1 << 61


class Histogram:
    """bounds: ascending upper bounds, inclusive; what is above them all has a bucket of its own.

    counts: int64, shape (len(bounds) + 1,), not cumulative. total: sum of the observations. Both after `fold` only.
    """

    __slots__ = ("_pending", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = np.array(bounds, np.float64)
        self.counts: npt.NDArray[np.int64] = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0
        self._pending: list[float] = []

    def observe(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) >= FOLD:
            self.fold()

    def fold(self) -> None:
        """Count what waits."""
        if self._pending:
            values = np.array(self._pending)
            self._pending.clear()
            self.add(values)

    def add(self, values: npt.NDArray[np.float64], weights: npt.NDArray[np.int64] | None = None) -> None:
        """Many at once; `weights`: how often each was observed."""
        place = np.searchsorted(self.bounds, values)
        self.counts += np.bincount(place, weights, len(self.counts)).astype(np.int64)
        self.total += float(values.sum() if weights is None else values @ weights)


class SharedHistogram(Histogram):
    """One in memory that outlives the process; what waits to be counted is there too.

        which of two states counts | state | state | what waits, FOLD float64
        state       how much waits, int64 | total, float64 | counts, int64

    A fold writes the state that does not count, and makes it count by one store: nothing is lost, or counted twice,
    whenever the process is killed. memory: `size(len(bounds))` bytes, zeroed or written by another one.
    """

    __slots__ = ("_length", "_many", "_place", "_sizes", "_states", "_waiting", "_which")

    def __init__(self, bounds: Sequence[float], memory: memoryview) -> None:
        super().__init__(bounds)
        self._length = 2 + len(self.counts)  # of a state, in numbers of 8 bytes
        end = 8 * (1 + 2 * self._length)
        self._which = memory[:8].cast("q")
        self._sizes = memory[8:end].cast("q")
        self._states = [np.frombuffer(memory, np.int64, self._length, 8 + 8 * i * self._length) for i in (0, 1)]
        self._waiting = memory[end:].cast("d")
        self._take()

    @staticmethod
    def size(bounds: int) -> int:
        return 8 * (1 + 2 * (2 + bounds + 1) + FOLD)

    def _take(self) -> None:
        """The state that counts."""
        which = self._which[0]
        state, self._place = self._states[which], which * self._length
        self._many, self.counts, self.total = int(state[0]), state[2:], float(state[1:2].view(np.float64)[0])

    def observe(self, value: float) -> None:
        many = self._many
        self._waiting[many] = value
        self._many = many = many + 1
        self._sizes[self._place] = many
        if many >= FOLD:
            self.fold()

    def fold(self) -> None:
        if self._many:
            self.add(np.empty(0))

    def add(self, values: npt.NDArray[np.float64], weights: npt.NDArray[np.int64] | None = None) -> None:
        fresh = Histogram(self.bounds.tolist())
        fresh.add(np.array(self._waiting[: self._many]))
        fresh.add(values, weights)
        which = 1 - self._which[0]
        state = self._states[which]
        state[0] = 0
        state[1:2].view(np.float64)[0] = self.total + fresh.total
        state[2:] = self.counts + fresh.counts
        self._which[0] = which
        self._take()


class Gaps:
    """Times between arrivals of one generation's tokens, in seconds, over all generations.

    Tokens that arrive together are one arrival: an engine that is ahead of the loop, or guesses several tokens at once,
    gives them in one batch. In the steady state, where a step has the generations of the step before, all gaps are one
    number, and noting them costs two comparisons; only when generations come or go is there a look-up by slot.
    """

    __slots__ = (
        "_counts", "_fresh", "_gaps", "_key", "_last", "_others", "_slots", "_then", "_waiting", "_width", "histogram",
    )  # fmt: skip

    def __init__(self, slots: int, histogram: Histogram) -> None:
        self.histogram = histogram
        self._last: npt.NDArray[np.int64] = np.full(slots, _NEVER, np.int64)  # ns of the last arrival, by slot
        self._fresh: list[int] = []
        self._slots: Any = self._last[:0].astype(np.int32)  # of the last batch, which `_last` does not know yet
        self._key: bytes | None = None
        self._then = 0
        self._width = 0
        self._gaps: list[int] = []  # one for each of `_counts` generations
        self._counts: list[int] = []
        self._others: list[npt.NDArray[np.int64]] = []
        self._waiting = 0

    def begin(self, slot: int) -> None:
        """A slot has a new user."""
        self._fresh.append(slot)
        self._key = None

    def note(self, slots: npt.NDArray[np.int32], now_ns: int) -> None:
        """Tokens have come for these slots (which may repeat)."""
        key = slots.tobytes()
        if not key:
            return
        if key == self._key:
            self._gaps.append(now_ns - self._then)
            self._counts.append(self._width)
            if len(self._gaps) >= FOLD:
                self.fold()
        else:
            self._look_up(np.frombuffer(key, np.int32), now_ns)
            self._key = key
        self._then = now_ns

    def _look_up(self, slots: npt.NDArray[np.int32], now_ns: int) -> None:
        last = self._last
        last[self._slots] = self._then
        if self._fresh:
            last[self._fresh] = _NEVER
            self._fresh.clear()
        repeated = len(slots) > 1 and int(np.bincount(slots).max()) > 1
        self._slots = np.unique(slots) if repeated else slots
        self._width = len(self._slots)
        self._others.append(now_ns - last[self._slots])
        self._waiting += self._width
        if self._waiting >= FOLD:
            self.fold()

    def fold(self) -> None:
        """Count what waits."""
        if self._gaps:
            gaps, counts = np.array(self._gaps) / 1e9, np.array(self._counts)
            self._gaps.clear()
            self._counts.clear()
            self.histogram.add(gaps, counts)
        if self._others:
            others = np.concatenate(self._others)
            self._others.clear()
            self._waiting = 0
            self.histogram.add(others[others < _TOO_LONG] / 1e9)
