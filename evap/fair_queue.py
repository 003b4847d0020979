"""Who is next: strict priority between levels, round robin over flows within a level, and each flow in order.

A flow is whoever shares are counted for (a key, an address). Rules:
1. A flow pays after it is served: an entry of cost c gives it one turn and c - 1 turns that it misses (deficit round
   robin with debts in place of savings: a newcomer is served in its first turn, whatever its entry costs). A flow that
   owes turns stays in the ring until it has paid, so that leaving the queue for a moment gains nothing.
2. Turns that another process has given to a flow since it came are debts here, too, MOST of them at a time: who is
   served everywhere has no more than who is served in one place.
3. A level that waits is overtaken by more urgent ones OVERTAKE times in a row at most: nobody starves.
4. Everything but `pop` is O(1); `pop` is O(flows that owe + levels), and costs nothing while nobody waits.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

#: Entries of more urgent levels that may go before one that waits.
OVERTAKE: Final = 16
#: Turns that a flow owes for what it was given elsewhere.
MOST: Final = 64

Elsewhere = Callable[[Hashable], int]


class _Flow(Generic[T]):
    __slots__ = ("debt", "elsewhere", "entries")

    def __init__(self, elsewhere: int) -> None:
        self.debt = 0  # turns to miss
        self.elsewhere = elsewhere  # turns given to it by others, of which we know
        self.entries: OrderedDict[T, int] = OrderedDict()  # -> cost


class _Level(Generic[T]):
    """One level's flows, in the order of their turns. A level without entries is thrown away, with all debts."""

    __slots__ = ("count", "flows", "overtaken")

    def __init__(self) -> None:
        self.flows: OrderedDict[Hashable, _Flow[T]] = OrderedDict()
        self.count = 0
        self.overtaken = 0

    def add(self, entry: T, flow: Hashable, cost: int, elsewhere: Elsewhere | None) -> None:
        known = self.flows.get(flow)
        if known is None:
            known = self.flows[flow] = _Flow(elsewhere(flow) if elsewhere is not None else 0)
        known.entries[entry] = cost
        self.count += 1

    def remove(self, entry: T, flow: Hashable) -> None:
        known = self.flows[flow]
        del known.entries[entry]
        self.count -= 1
        self._forget(flow, known)

    def pop(self, elsewhere: Elsewhere | None) -> T:
        """The next entry; there is one."""
        while True:
            for _ in range(len(self.flows)):
                flow, state = next(iter(self.flows.items()))
                self.flows.move_to_end(flow)
                if elsewhere is not None and state.entries:
                    known, state.elsewhere = state.elsewhere, elsewhere(flow)
                    state.debt = max(state.debt, min(MOST, state.debt + state.elsewhere - known))
                if state.debt:
                    state.debt -= 1
                    self._forget(flow, state)
                elif state.entries:
                    entry, cost = state.entries.popitem(last=False)
                    self.count -= 1
                    state.debt = max(0, cost - 1)
                    self._forget(flow, state)
                    return entry
            self._skip()

    def ahead(self, flow: Hashable) -> int:
        """Entries that go before one that joins now, within the flows: of its own flow all, of others what their turns
        are until then. Too many by one for each flow whose turn of the last round comes after it."""
        own = self.flows.get(flow)
        rounds = 1 + (own.debt + sum(max(1, cost) for cost in own.entries.values()) if own is not None else 0)
        many = len(own.entries) if own is not None else 0
        for state in self.flows.values():
            left = rounds - state.debt
            if state is not own:
                for cost in state.entries.values():
                    if left <= 0:
                        break
                    left -= max(1, cost)
                    many += 1
        return many

    def _skip(self) -> None:
        """Nobody had a turn: pass over the rounds in which debts are paid and nothing else."""
        rounds = min(state.debt for state in self.flows.values() if state.entries)
        for flow, state in list(self.flows.items()):
            state.debt = max(0, state.debt - rounds)
            self._forget(flow, state)

    def _forget(self, flow: Hashable, state: _Flow[T]) -> None:
        if not state.entries and not state.debt:
            del self.flows[flow]


class FairQueue(Generic[T]):
    """Entries are hashable and different from each other. `len` is how many wait.

    elsewhere: how many turns other processes have given to a flow, ever; None: there are none.
    """

    __slots__ = ("_levels", "_order", "_where", "elsewhere")

    def __init__(self) -> None:
        self.elsewhere: Elsewhere | None = None
        self._levels: dict[int, _Level[T]] = {}
        self._order: list[int] = []  # the levels that have entries, most urgent (lowest) first
        self._where: dict[T, tuple[int, Hashable]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, entry: object) -> bool:
        return entry in self._where

    def push(self, entry: T, flow: Hashable, level: int, cost: int = 1) -> None:
        """Raises ValueError for an entry that waits already."""
        if entry in self._where:
            raise ValueError("the entry waits already")
        found = self._levels.get(level)
        if found is None:
            found = self._levels[level] = _Level()
            bisect.insort(self._order, level)
        found.add(entry, flow, cost, self.elsewhere)
        self._where[entry] = level, flow

    def pop(self) -> T:
        """Who is next. Raises IndexError when nobody waits."""
        level = self._choose()
        entry = self._levels[level].pop(self.elsewhere)
        del self._where[entry]
        self._drop_empty(level)
        return entry

    def remove(self, entry: T) -> bool:
        """Take it out, wherever it stands. False: it does not wait."""
        where = self._where.pop(entry, None)
        if where is None:
            return False
        level, flow = where
        self._levels[level].remove(entry, flow)
        self._drop_empty(level)
        return True

    def level(self, entry: T) -> int:
        """Raises KeyError when it does not wait."""
        return self._where[entry][0]

    def ahead(self, flow: Hashable, level: int) -> int:
        """How many of its own level go before an entry that joins now. O(entries of the level)."""
        found = self._levels.get(level)
        return found.ahead(flow) if found is not None else 0

    def _choose(self) -> int:
        if not self._order:
            raise IndexError("nobody waits")
        levels = self._levels
        if len(self._order) == 1:
            levels[self._order[0]].overtaken = 0
            return self._order[0]
        chosen = next((n for n in self._order[1:] if levels[n].overtaken >= OVERTAKE), self._order[0])
        levels[chosen].overtaken = 0
        for number in self._order[bisect.bisect_right(self._order, chosen) :]:
            levels[number].overtaken += 1
        return chosen

    def _drop_empty(self, level: int) -> None:
        if not self._levels[level].count:
            del self._levels[level]
            self._order.remove(level)
