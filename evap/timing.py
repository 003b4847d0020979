"""Deadlines of exchanges: one timer, whatever their number; nothing at all while there are none."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

#: Entries of what has ended already are thrown away together when they are more than half, and more than this.
MIN_STALE: Final = 64


class Deadlines(Generic[T]):
    """later: calls a function after so many seconds. expired: told of each item once, on the loop, not before its time.

    `add` is O(log n). An item that is removed is forgotten at once: a deadline may be days away, and an item large.
    """

    def __init__(
        self, now_ns: Callable[[], int], later: Callable[[float, Callable[[], None]], object],
        expired: Callable[[T], None],
    ) -> None:  # fmt: skip
        self._now_ns, self._later, self._expired = now_ns, later, expired
        self._heap: list[tuple[int, int]] = []  # (when, number)
        self._items: dict[int, T] = {}
        self._number_of: dict[T, int] = {}
        self._numbers = itertools.count()
        self._armed_ns = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T, at_ns: int) -> None:
        """One that has a deadline already has this one instead."""
        self.remove(item)
        number = next(self._numbers)
        self._items[number], self._number_of[item] = item, number
        heapq.heappush(self._heap, (at_ns, number))
        self._arm()

    def remove(self, item: T) -> None:
        """It is over. No-op for one that has no deadline."""
        number = self._number_of.pop(item, None)
        if number is None:
            return
        del self._items[number]
        if len(self._heap) > max(MIN_STALE, 2 * len(self._items)):
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapq.heapify(self._heap)

    def _arm(self) -> None:
        """A timer for the first deadline; one that was armed for a later time stays, and finds nothing to do."""
        if self._heap and (not self._armed_ns or self._heap[0][0] < self._armed_ns):
            self._armed_ns = self._heap[0][0]
            self._later(max(0.0, (self._armed_ns - self._now_ns()) / 1e9), self._wake)

    def _wake(self) -> None:
        now_ns = self._now_ns()
        if self._armed_ns > now_ns + 1_000_000:
            return  # of a timer that an earlier one has replaced
        self._armed_ns = 0
        while self._heap and self._heap[0][0] <= now_ns:
            item = self._items.pop(heapq.heappop(self._heap)[1], None)
            if item is not None:
                del self._number_of[item]
                self._expired(item)
        self._arm()
