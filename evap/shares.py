"""How much of the queue each caller holds, and who holds most: known at once, so that a full queue refuses cheaply.

A share is the larger of a caller's parts of the two limits: requests, and prompt tokens. Ranks are a heap with stale
entries: one that says more than is true is corrected when it comes to the top, one that says less never gets there
before a truer one of the same caller.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

E = TypeVar("E", bound=Hashable)

#: Stale entries of the heap that are thrown away together.
MIN_STALE: Final = 64


class _Share(Generic[E]):
    __slots__ = ("count", "levels", "tokens")

    def __init__(self) -> None:
        self.levels: dict[int, OrderedDict[E, int]] = {}  # level -> entry -> tokens; oldest first
        self.count = self.tokens = 0


class Shares(Generic[E]):
    """max_requests, max_tokens: what a share is a part of."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests, self._max_tokens = max(1, max_requests), max(1, max_tokens)
        self._shares: dict[Hashable, _Share[E]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []  # (-weight, number, flow)
        self._noted: dict[Hashable, float] = {}  # flow -> the most that the heap says of it
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._shares)

    def count(self, flow: Hashable) -> int:
        """Requests that a caller has waiting."""
        share = self._shares.get(flow)
        return share.count if share is not None else 0

    def last(self, flow: Hashable) -> E:
        """The newest of a caller's least urgent entries."""
        levels = self._shares[flow].levels
        return next(reversed(levels[max(levels)]))

    def weight(self, flow: Hashable, requests: int = 0, tokens: int = 0) -> float:
        """A caller's share, with so much more."""
        share = self._shares.get(flow)
        if share is not None:
            requests, tokens = requests + share.count, tokens + share.tokens
        return max(requests / self._max_requests, tokens / self._max_tokens)

    def add(self, flow: Hashable, entry: E, level: int, tokens: int) -> None:
        share = self._shares.get(flow)
        if share is None:
            share = self._shares[flow] = _Share()
        share.levels.setdefault(level, OrderedDict())[entry] = tokens
        share.count += 1
        share.tokens += tokens
        self._note(flow, self.weight(flow))

    def remove(self, flow: Hashable, entry: E, level: int) -> None:
        """Raises KeyError for one that is not there."""
        share = self._shares[flow]
        entries = share.levels[level]
        share.tokens -= entries.pop(entry)
        share.count -= 1
        if not entries:
            del share.levels[level]
        if not share.count:
            del self._shares[flow]

    def longest(self) -> tuple[Hashable, float]:
        """Who holds most, and how much; (None, 0) if nobody holds anything."""
        heap, noted = self._heap, self._noted
        while heap:
            weight, flow = -heap[0][0], heap[0][2]
            true = self.weight(flow)
            if weight == noted.get(flow) and weight == true:
                return flow, weight
            heapq.heappop(heap)
            if weight == noted.get(flow):
                del noted[flow]
                if flow in self._shares:
                    self._note(flow, true)
        return None, 0.0

    def _note(self, flow: Hashable, weight: float) -> None:
        if weight <= self._noted.get(flow, -1.0):
            return
        self._noted[flow] = weight
        heapq.heappush(self._heap, (-weight, next(self._numbers), flow))
        if len(self._heap) > MIN_STALE + 2 * len(self._shares):
            self._noted = {flow: self.weight(flow) for flow in self._shares}
            self._heap = [(-weight, next(self._numbers), flow) for flow, weight in self._noted.items()]
            heapq.heapify(self._heap)
