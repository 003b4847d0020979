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

2. An empty queue takes a request of any size.
3. An entry is counted in the totals from `join` to `leave`, once, and in its caller's share (`shares.py`) while it
   stands in a queue: what is in hand cannot be pushed out.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from evap.errors import Overloaded, RateLimited
from evap.fair_queue import FairQueue
from evap.shares import Shares
from evap.turns import Turns

T = TypeVar("T", bound=Hashable)

#: What a token is taken to be before there are tokens. English text has about 4.5, with JSON around it.
OCTETS_PER_TOKEN: Final = 4
#: Prompt tokens that weigh as much as one more generation when turns are counted.
TOKENS_PER_TURN: Final = 2048
MAX_RETRY_AFTER_S: Final = 60.0
#: How much of the mean interval between two departures the last one makes.
_NEWEST: Final = 0.1
#: So many intervals, without an empty queue in between, make a pace.
_PACE: Final = 10
#: The limits that are counted when they refuse (evap_limit_total).
SHARE: Final = "queue_share"
FULL: Final = "queue_full"
PUSHED: Final = "queue_pushed_out"


class Stage(enum.Enum):
    __hash__ = object.__hash__  # members are singletons; Enum's own hash is Python code

    PROMPTS = "waits to be tokenized"
    HAND = "is being tokenized"
    ENGINE = "waits for the engine"


class _Entry(Generic[T]):
    __slots__ = ("cost", "flow", "item", "level", "stage", "tokens")

    def __init__(self, item: T, flow: Hashable, level: int, tokens: int, cost: int) -> None:
        self.item, self.flow, self.level, self.tokens, self.cost = item, flow, level, tokens, cost
        self.stage = Stage.HAND


def cost(n: int, tokens: int) -> int:
    """Turns that a request is worth."""
    return n + tokens // TOKENS_PER_TURN


class Admission(Generic[T]):
    """max_requests, max_tokens: what may wait in all. counts: limit -> refusals, for /metrics."""

    def __init__(self, max_requests: int, max_tokens: int, counts: dict[str, int] | None = None) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.counts = counts if counts is not None else {}
        self.tokens = 0
        self._entries: dict[T, _Entry[T]] = {}
        self._queues: dict[Stage, FairQueue[_Entry[T]]] = {Stage.PROMPTS: FairQueue(), Stage.ENGINE: FairQueue()}
        self._shares = Shares[_Entry[T]](max_requests, max_tokens)
        self._turns: Turns | None = None
        self._interval_ns = 0.0
        self._left_ns = 0
        self._departures = 0  # intervals since the queue was empty

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def waiting(self, stage: Stage) -> int:
        return len(self._queues[stage])

    def share(self, turns: Turns) -> None:
        """Other processes serve the same callers."""
        self._turns = turns
        self._queues[Stage.ENGINE].elsewhere = turns.served_elsewhere

    # Who may wait

    def check(self, flow: Hashable, tokens: int, now_ns: int) -> None:
        """Raises RateLimited or Overloaded, with retry_after_s, if there is no room and none to be made."""
        if self.fits(tokens) or self._may_push(flow, tokens):
            return
        if waiting := self._shares.count(flow):
            self._count(SHARE)
            raise share_used(waiting, self.retry_after_s(now_ns))
        self._count(FULL)
        raise Overloaded(
            f"{len(self._entries)} requests wait for the engine; try again later", code=FULL,
            retry_after_s=self.retry_after_s(now_ns),
        )  # fmt: skip

    def make_room(self, flow: Hashable, tokens: int) -> list[T]:
        """For an entry of `flow`. Returns the items that have left for it, to be answered 429. Ask `fits` after it:
        what the longer shares have may not be enough."""
        out: list[T] = []
        while not self.fits(tokens) and self._may_push(flow, tokens):
            victim = self._shares.last(self._shares.longest()[0]).item
            self._count(PUSHED)
            self.leave(victim)
            out.append(victim)
        return out

    def fits(self, tokens: int) -> bool:
        waiting = len(self._entries)
        return waiting < self.max_requests and (not waiting or self.tokens + tokens <= self.max_tokens)

    def retry_after_s(self, now_ns: int) -> float:
        """When what waits now will have left, at the pace of the last departures."""
        interval = max(self._interval_ns, now_ns - self._left_ns if self._left_ns else 0)
        return min(MAX_RETRY_AFTER_S, max(1.0, len(self._entries) * interval / 1e9))

    def wait_ns(self, flow: Hashable, level: int) -> int:
        """What an entry that joins now will wait for the engine: who goes before it in its level, at the pace of the
        last departures. 0: there is no pace yet."""
        if self._departures < _PACE:
            return 0
        return int(self._queues[Stage.ENGINE].ahead(flow, level) * self._interval_ns)

    def _may_push(self, flow: Hashable, tokens: int) -> bool:
        longest, weight = self._shares.longest()
        return longest != flow and weight > self._shares.weight(flow, 1, tokens)

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    # The way through

    def join(self, item: T, flow: Hashable, level: int, tokens: int, n: int, stage: Stage) -> None:
        """Count an item, in a stage, whether there is room or not."""
        entry = self._entries[item] = _Entry(item, flow, level, tokens, cost(n, tokens))
        self.tokens += tokens
        self._enter(entry, stage)

    def take(self, stage: Stage, now_ns: int) -> T:
        """Who is next in a queue; it is in hand then, and still counted. Raises IndexError when nobody waits there."""
        entry = self._queues[stage].pop()
        entry.stage = Stage.HAND
        self._shares.remove(entry.flow, entry, entry.level)
        if stage is Stage.ENGINE:
            self._departed(now_ns)
            if self._turns is not None:
                self._turns.serve(entry.flow, max(1, entry.cost))
        return entry.item

    def put(self, item: T, stage: Stage) -> None:
        """What was in hand waits for the next stage."""
        self._enter(self._entries[item], stage)

    def leave(self, item: T) -> bool:
        """It is submitted, refused or gone. False: it was not counted."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        self._exit(entry)
        self.tokens -= entry.tokens
        if not self._entries:
            self._left_ns = self._departures = 0  # the pace of a queue that was empty in between says nothing
        return True

    def move(self, item: T, level: int) -> None:
        """Its priority has changed: it stands at the end of its flow, in the new level."""
        entry = self._entries.get(item)
        if entry is None or entry.level == level:
            return
        stage = entry.stage
        self._exit(entry)
        entry.level = level
        self._enter(entry, stage)

    def items(self) -> list[T]:
        """All that are counted."""
        return list(self._entries)

    def _enter(self, entry: _Entry[T], stage: Stage) -> None:
        entry.stage = stage
        if stage is not Stage.HAND:
            self._queues[stage].push(entry, entry.flow, entry.level, entry.cost)
            self._shares.add(entry.flow, entry, entry.level, entry.tokens)

    def _exit(self, entry: _Entry[T]) -> None:
        if entry.stage is not Stage.HAND:
            self._queues[entry.stage].remove(entry)
            self._shares.remove(entry.flow, entry, entry.level)

    def _departed(self, now_ns: int) -> None:
        if self._left_ns:
            self._departures += 1
            weight = max(_NEWEST, 1 / self._departures)  # at first a plain mean
            self._interval_ns += (now_ns - self._left_ns - self._interval_ns) * weight
        self._left_ns = now_ns


def share_used(waiting: int, retry_after_s: float) -> RateLimited:
    """The answer to a caller who fills the queue. waiting: his requests; 0: not said."""
    many = f"you have {waiting} requests waiting, " if waiting else "you have more requests waiting than others, "
    return RateLimited(many + "and the queue is full; try again later", code=SHARE, retry_after_s=retry_after_s)
