"""Who may wait for the engine, how many, and in which order: everything between a parsed request and its first slot.

Two fair queues in a row, because the pool that tokenizes large prompts is slower than an engine that is idle:

    parsed --large prompt--> PROMPTS --a thread is free--> in hand --tokenized--> ENGINE --a place is free--> submitted
           --small prompt------------------------------------------------------> ENGINE

Rules:
1. Who is refused, and how (`check`), is decided before anything is tokenized. Tokens are an estimate then:
   OCTETS_PER_TOKEN octets of the body each.

   | the queue | the caller has waiting | answer |
   | --- | --- | --- |
   | has room | | waits |
   | is full | less than another caller, this request included | waits; the newest of the longest share is sent 429 |
   | is full | at least as much as any other | 429: it is the caller's own share that is used up |
   | is full | nothing, and no other has more than this request | 503: the server is full |

2. A share is the larger of a caller's parts of the two limits. An empty queue takes a request of any size.
3. An entry is counted from `join` to `leave`, once, whatever happens to it in between.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from evap.errors import Overloaded, RateLimited
from evap.fair_queue import FairQueue

T = TypeVar("T", bound=Hashable)

#: What a token is taken to be before there are tokens. English text has about 4.5, with JSON around it.
OCTETS_PER_TOKEN: Final = 4
#: Prompt tokens that weigh as much as one more generation when turns are counted.
TOKENS_PER_TURN: Final = 2048
MAX_RETRY_AFTER_S: Final = 60.0
#: How much of the mean interval between two departures the last one makes.
_NEWEST: Final = 0.1
#: The limits that are counted when they refuse (evap_limit_total).
SHARE: Final = "queue_share"
FULL: Final = "queue_full"
PUSHED: Final = "queue_pushed_out"


class Stage(enum.Enum):
    PROMPTS = "waits to be tokenized"
    HAND = "is being tokenized"
    ENGINE = "waits for the engine"


class _Entry(Generic[T]):
    __slots__ = ("cost", "flow", "item", "level", "stage", "tokens")

    def __init__(self, item: T, flow: Hashable, level: int, tokens: int, cost: int) -> None:
        self.item, self.flow, self.level, self.tokens, self.cost = item, flow, level, tokens, cost
        self.stage = Stage.HAND


class _Share(Generic[T]):
    __slots__ = ("entries", "tokens")

    def __init__(self) -> None:
        self.entries: OrderedDict[_Entry[T], None] = OrderedDict()  # oldest first
        self.tokens = 0


class Admission(Generic[T]):
    """max_requests, max_tokens: what may wait in all. counts: limit -> refusals, for /metrics."""

    def __init__(self, max_requests: int, max_tokens: int, counts: dict[str, int] | None = None) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.counts = counts if counts is not None else {}
        self.tokens = 0
        self._entries: dict[T, _Entry[T]] = {}
        self._queues: dict[Stage, FairQueue[_Entry[T]]] = {Stage.PROMPTS: FairQueue(), Stage.ENGINE: FairQueue()}
        self._shares: dict[Hashable, _Share[T]] = {}
        self._interval_ns = 0.0
        self._left_ns = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def waiting(self, stage: Stage) -> int:
        return len(self._queues[stage])

    # Who may wait

    def check(self, flow: Hashable, tokens: int, now_ns: int) -> None:
        """Raises RateLimited or Overloaded, with retry_after_s, if `join` is not to be called. Changes nothing."""
        if self._fits(tokens):
            return
        mine = self._shares.get(flow)
        own = self._weight(mine, 1, tokens)
        if any(self._weight(share) > own for other, share in self._shares.items() if other != flow):
            return  # `join` makes room
        if mine is not None:
            self._count(SHARE)
            raise _share_used(len(mine.entries), self.retry_after_s(now_ns))
        self._count(FULL)
        raise Overloaded(
            f"{len(self._entries)} requests wait for the engine; try again later", code="queue_full",
            retry_after_s=self.retry_after_s(now_ns),
        )  # fmt: skip

    def retry_after_s(self, now_ns: int) -> float:
        """When what waits now will have left, at the pace of the last departures."""
        interval = max(self._interval_ns, now_ns - self._left_ns if self._left_ns else 0)
        return min(MAX_RETRY_AFTER_S, max(1.0, len(self._entries) * interval / 1e9))

    def _fits(self, tokens: int) -> bool:
        waiting = len(self._entries)
        return waiting < self.max_requests and (not waiting or self.tokens + tokens <= self.max_tokens)

    def _weight(self, share: _Share[T] | None, requests: int = 0, tokens: int = 0) -> float:
        if share is not None:
            requests, tokens = requests + len(share.entries), tokens + share.tokens
        return max(requests / max(1, self.max_requests), tokens / max(1, self.max_tokens))

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    # The way through

    def join(self, item: T, flow: Hashable, level: int, tokens: int, n: int, stage: Stage) -> list[T]:
        """Count an item, in a stage. Returns the items that made room for it: they are out, and to be answered 429."""
        out: list[T] = []
        share = self._shares.get(flow)
        while not self._fits(tokens) and (victim := self._victim(flow, self._weight(share, 1, tokens))) is not None:
            self._count(PUSHED)
            self.leave(victim)
            out.append(victim)
        if share is None:
            share = self._shares[flow] = _Share()
        entry = self._entries[item] = _Entry(item, flow, level, tokens, n + tokens // TOKENS_PER_TURN)
        share.entries[entry] = None
        share.tokens += tokens
        self.tokens += tokens
        self._enter(entry, stage)
        return out

    def take(self, stage: Stage, now_ns: int) -> T:
        """Who is next in a queue; it is in hand then, and still counted. Raises IndexError when nobody waits there."""
        entry = self._queues[stage].pop()
        entry.stage = Stage.HAND
        if stage is Stage.ENGINE:
            self._departed(now_ns)
        return entry.item

    def put(self, item: T, stage: Stage) -> None:
        """What was in hand waits for the next stage."""
        self._enter(self._entries[item], stage)

    def leave(self, item: T) -> bool:
        """It is submitted, refused or gone. False: it was not counted."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        if entry.stage is not Stage.HAND:
            self._queues[entry.stage].remove(entry)
        share = self._shares[entry.flow]
        del share.entries[entry]
        share.tokens -= entry.tokens
        self.tokens -= entry.tokens
        if not share.entries:
            del self._shares[entry.flow]
            if not self._entries:
                self._left_ns = 0  # the pace of a queue that was empty in between says nothing
        return True

    def move(self, item: T, level: int) -> None:
        """Its priority has changed: it stands at the end of its flow, in the new level."""
        entry = self._entries.get(item)
        if entry is None or entry.level == level:
            return
        entry.level = level
        stage = entry.stage
        if stage is not Stage.HAND:
            self._queues[stage].remove(entry)
            self._enter(entry, stage)

    def items(self) -> list[T]:
        """All that are counted."""
        return list(self._entries)

    def _enter(self, entry: _Entry[T], stage: Stage) -> None:
        entry.stage = stage
        if stage is not Stage.HAND:
            self._queues[stage].push(entry, entry.flow, entry.level, entry.cost)

    def _victim(self, flow: Hashable, own: float) -> T | None:
        """The newest of the least urgent entries of the longest share, if that is longer than `own`."""
        best: T | None = None
        longest = own
        for other, share in self._shares.items():
            weight = self._weight(share)
            if other != flow and weight > longest:
                idle = [entry for entry in reversed(share.entries) if entry.stage is not Stage.HAND]
                if idle:
                    best, longest = max(idle, key=_level).item, weight
        return best

    def _departed(self, now_ns: int) -> None:
        if self._left_ns:
            last = float(now_ns - self._left_ns)
            self._interval_ns += (last - self._interval_ns) * (_NEWEST if self._interval_ns else 1.0)
        self._left_ns = now_ns


def _level(entry: _Entry[T]) -> int:
    return entry.level


def pushed_out(retry_after_s: float) -> RateLimited:
    """The answer to an item that `join` has returned."""
    return _share_used(0, retry_after_s)


def _share_used(waiting: int, retry_after_s: float) -> RateLimited:
    many = f"you have {waiting} requests waiting, " if waiting else "you have more requests waiting than others, "
    return RateLimited(many + "and the queue is full; try again later", code=SHARE, retry_after_s=retry_after_s)
