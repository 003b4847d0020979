"""From a parsed request to its first slot: straight through while the engine has places, else in `admission.py`'s line.

The engine is given as many generations as it runs at once, and a few more so that a place that becomes free is taken in
the same step; all others wait here, where order is fair and a request that is cancelled or late costs the engine
nothing. Large prompts are tokenized in the pool, POOL_AT_ONCE at a time, in that order too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final

from evap.admission import OCTETS_PER_TOKEN, Admission, Stage, cost, share_used
from evap.config import EngineConfig
from evap.errors import DeadlineExceeded, EvapError
from evap.exchange import Exchange
from evap.messages import Prompt
from evap.protocol.limits import network_of
from evap.slots import SlotTable
from evap.turns import Turns

#: prompts in bodies shorter than this are tokenized on the loop: a thread switch would cost more
INLINE_BODY_BYTES: Final = 8 << 10
#: Prompts in the pool's hands; more would only wait in its own line, which is not fair.
POOL_AT_ONCE: Final = 4
#: Requests started in one go when places become free; then other work of the loop has its turn.
STARTS_PER_PASS: Final = 16
#: A request that would wait for more than so many times its deadline is refused at once. Not for less, because a pace
#: is no promise: answers differ in length, and those before it may leave. The engine has other work until then.
SURELY_LATE: Final = 2
#: One place in so many is given to the engine beyond what it runs.
AHEAD: Final = 8
#: Between two looks at what other processes have in the engine, while somebody waits here.
LOOK_S: Final = 0.01

InPool = Callable[[Callable[[], Any], Callable[[Any], None]], None]


class WaitingRoom:
    """tokenize: in any thread; its result or exception goes to `prepared`, on the loop. refuse: answer with an error.

    Each exchange that `enter` takes is prepared or refused, once, unless it is taken out with `leave`.
    """

    def __init__(
        self, config: EngineConfig, *, slots: SlotTable[Any], now_ns: Callable[[], int], in_pool: InPool,
        soon: Callable[[Callable[[], None]], object], tokenize: Callable[[Exchange], Prompt],
        prepared: Callable[[Exchange, Any], None], refuse: Callable[[Exchange, EvapError], None],
        counts: dict[str, int],
    ) -> None:  # fmt: skip
        self.line = Admission[Exchange](config.max_queued_requests, config.max_queued_tokens, counts)
        self._slots = slots
        self._max_choices = config.max_choices
        self._now_ns, self._in_pool, self._soon = now_ns, in_pool, soon
        self._tokenize, self._prepared, self._refuse = tokenize, prepared, refuse
        self._tokenizing = 0
        self._prompts: dict[Exchange, Prompt] = {}  # of those that were tokenized before their place was free
        self._pumping = False
        self._turns: Turns | None = None  # of several processes
        self._later: Callable[[float, Callable[[], None]], object] = lambda seconds, work: None
        self._looking = False
        self.places = 0
        self.engine_runs(config.max_running)

    def share(self, turns: Turns, later: Callable[[float, Callable[[], None]], object]) -> None:
        """Other processes fill the same places, and serve the same callers."""
        self._turns, self._later = turns, later
        self.line.share(turns)

    def engine_runs(self, generations: int) -> None:
        """How many the engine runs at once. A request of many choices may exceed the places, never the slots."""
        size = self._slots.size
        self.places = min(generations + generations // AHEAD, max(size // 2, size - self._max_choices))

    def check(self, flow: Hashable, octets: int, *, pooled: bool) -> None:
        """Raises RateLimited or Overloaded for a request that would have to wait and may not, by its body's octets."""
        if not self._direct(pooled):
            self.line.check(flow, octets // OCTETS_PER_TOKEN, self._now_ns())

    def enter(self, exchange: Exchange, flow: Hashable, octets: int, *, pooled: bool) -> None:
        """After `check`, and with nothing in between that waits."""
        direct, tokens = self._direct(pooled), octets // OCTETS_PER_TOKEN
        if direct and not pooled:
            if self._turns is not None:
                self._turns.serve(flow, cost(exchange.request.n, tokens))
            self._prepare(exchange)
            self._look_around()
            return
        if not self._make_room(exchange, flow, tokens, direct=direct):
            return
        at_once = pooled and self._pool_is_free()
        stage = Stage.HAND if at_once else Stage.PROMPTS if pooled else Stage.ENGINE
        self.line.join(exchange, flow, exchange.priority, tokens, exchange.request.n, stage)
        if at_once:
            self._to_pool(exchange)
        self._look_around()

    def hold(self, exchange: Exchange, flow: Hashable, octets: int) -> None:
        """The same for one whose prompt is tokenized elsewhere, in an order of its own; `deliver` brings it."""
        tokens = octets // OCTETS_PER_TOKEN
        if self._make_room(exchange, flow, tokens, direct=self._place() and not len(self.line)):
            self.line.join(exchange, flow, exchange.priority, tokens, exchange.request.n, Stage.HAND)

    def deliver(self, exchange: Exchange, result: Prompt | Exception) -> None:
        if exchange not in self.line:
            return  # the client has left meanwhile
        if isinstance(result, Exception) or self._place():
            self.line.leave(exchange)
            self._prepared(exchange, result)
        else:
            self._prompts[exchange] = result
            self.line.put(exchange, Stage.ENGINE)
        self._look_around()

    def _make_room(self, exchange: Exchange, flow: Hashable, tokens: int, *, direct: bool) -> bool:
        """False: there is none for it, and it has been refused."""
        if direct:
            return True
        if exchange.deadline_ns and self._late(exchange, flow):
            return False
        for other in self.line.make_room(flow, tokens):
            self._prompts.pop(other, None)
            self._refuse(other, share_used(0, self.line.retry_after_s(self._now_ns())))
        if not self.line.fits(tokens):
            self._refuse(exchange, share_used(0, self.line.retry_after_s(self._now_ns())))
            return False
        return True

    def _late(self, exchange: Exchange, flow: Hashable) -> bool:
        """It cannot be on time any more, and has been refused."""
        now_ns = self._now_ns()
        if now_ns + self.line.wait_ns(flow, exchange.priority) // SURELY_LATE <= exchange.deadline_ns:
            return False
        self.line.counts["deadline"] = self.line.counts.get("deadline", 0) + 1
        error = DeadlineExceeded(
            "the request would wait for longer than its deadline allows", retry_after_s=self.line.retry_after_s(now_ns)
        )
        self._refuse(exchange, error)
        return True

    def leave(self, exchange: Exchange) -> None:
        """It is cancelled, refused or late. No-op for one that does not wait."""
        if self.line.leave(exchange):
            self._prompts.pop(exchange, None)

    def pump(self) -> None:
        """Places have become free."""
        self._look_around()
        if self._pumping or not self.line.waiting(Stage.ENGINE):
            return
        self._pumping = True  # a place that is given back at once must not start another loop in this one
        try:
            for _ in range(STARTS_PER_PASS):
                if not self.line.waiting(Stage.ENGINE) or self._full():
                    return
                self._start(self.line.take(Stage.ENGINE, self._now_ns()))
            self._soon(self.pump)
        finally:
            self._pumping = False
            self._look_around()

    def _start(self, exchange: Exchange) -> None:
        self.line.leave(exchange)
        prompt = self._prompts.pop(exchange, None)
        if prompt is not None:
            self._prepared(exchange, prompt)
        else:
            self._prepare(exchange)

    def _place(self) -> bool:
        """There is a place in the engine, and nobody waits for it."""
        return not self._full() and not self.line.waiting(Stage.ENGINE)

    def _full(self) -> bool:
        """All places are taken, here or elsewhere. An even part of them is ours, whatever the others have."""
        own = self._slots.size - self._slots.free
        if own >= self.places or self._turns is None:
            return own >= self.places
        return own >= max(1, self.places // self._turns.processes) and own + self._turns.held_elsewhere() >= self.places

    def _look_around(self) -> None:
        """Tell the others what we have; while somebody waits here, see from time to time what they have."""
        if self._turns is None:
            return
        self._turns.hold(self._slots.size - self._slots.free)
        if not self._looking and self.line.waiting(Stage.ENGINE):
            self._looking = True
            self._later(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = False
        self.pump()

    def _pool_is_free(self) -> bool:
        return self._tokenizing < POOL_AT_ONCE and not self.line.waiting(Stage.PROMPTS)

    def _direct(self, pooled: bool) -> bool:
        """Nothing is in the way of such a request, as far as one can see now."""
        return self._place() and (not pooled or self._pool_is_free())

    def _prepare(self, exchange: Exchange) -> None:
        try:
            prompt: Prompt | Exception = self._tokenize(exchange)
        except Exception as error:  # noqa: BLE001 - judged by `prepared`, as when it comes from the pool
            prompt = error
        self._prepared(exchange, prompt)

    def _to_pool(self, exchange: Exchange) -> None:
        self._tokenizing += 1
        self._in_pool(lambda: self._tokenize(exchange), partial(self._tokenized, exchange))

    def _tokenized(self, exchange: Exchange, result: Prompt | Exception) -> None:
        self._tokenizing -= 1
        if self.line.waiting(Stage.PROMPTS):
            self._to_pool(self.line.take(Stage.PROMPTS, self._now_ns()))
        self.deliver(exchange, result)


def flow_of(key_id: str, peer: str, connection: object) -> Hashable:
    """For whom shares are counted: a key; without keys a client's network; where that is unknown a connection."""
    return key_id or network_of(peer) or id(connection)
