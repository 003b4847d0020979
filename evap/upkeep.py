"""What time alone makes of open exchanges: comments for the silent, an end for the late. No clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import TypeVar

from evap.errors import DeadlineExceeded, EvapError
from evap.exchange import Exchange, State
from evap.steps import Steps
from evap.timing import Deadlines

T = TypeVar("T")


class Upkeep:
    """open: the exchanges that are not settled, oldest first. end: answer one with an error, and have the engine stop.

    counts: limit -> how often it has ended something. ttft_s: see --ttft-timeout; 0 never.
    """

    def __init__(
        self, open: Mapping[Exchange, None], *, steps: Steps, flush: Callable[[], None], now_ns: Callable[[], int],
        later: Callable[[float, Callable[[], None]], object], end: Callable[[Exchange, EvapError], None],
        counts: dict[str, int], ttft_s: float,
    ) -> None:  # fmt: skip
        self._open, self._steps = open, steps
        self._flush, self._now_ns, self._end = flush, now_ns, end
        self._counts, self._ttft_ns = counts, int(ttft_s * 1e9)
        self._later = later
        self._deadlines = self.deadlines(self._late)
        self._progress: dict[Exchange, int] = {}  # tokens, when `tick` looked last
        self._unended: list[Exchange] = []  # when `overdue` looked last

    # For what is not an exchange yet

    def deadlines(self, expired: Callable[[T], None]) -> Deadlines[T]:
        return Deadlines(self._now_ns, self._later, expired)

    def limit(self, item: T, deadline_ms: int, deadlines: Deadlines[T], silent: Deadlines[T]) -> None:
        """It begins now: the time that its client gives it (0: any), and --ttft-timeout."""
        if deadline_ms:
            deadlines.add(item, self._now_ns() + deadline_ms * 1_000_000)
        if self._ttft_ns:
            silent.add(item, self._now_ns() + self._ttft_ns)

    def late(self) -> DeadlineExceeded:
        self._count("deadline")
        return DeadlineExceeded("the request's deadline has passed")

    def silent(self) -> DeadlineExceeded:
        self._count("ttft")
        return DeadlineExceeded("there was no token in time; the request may be retried", code="ttft_timeout")

    def _count(self, limit: str) -> None:
        self._counts[limit] = self._counts.get(limit, 0) + 1

    # Exchanges

    def expect(self, exchange: Exchange, at_ns: int) -> None:
        """It is of no use from then on."""
        exchange.deadline_ns = at_ns
        self._deadlines.add(exchange, at_ns)

    def settled(self, exchange: Exchange) -> None:
        self._progress.pop(exchange, None)
        self._deadlines.remove(exchange)

    def tick(self) -> None:
        """Every keepalive period: a streamed answer that has been silent since the last tick gets an SSE comment; one
        that still waits gets its head before that, so that an error will have to be an event, and proxies see life."""
        seen: dict[Exchange, int] = {}
        for exchange in self._open:
            if not exchange.request.stream:
                continue
            if exchange.state is State.OPEN and exchange.kind == "sse":
                if exchange in self._progress:
                    (exchange.comment if exchange.status else exchange.announce)()
                seen[exchange] = 0
            elif exchange.state is State.RUNNING:
                self._steps.counts(exchange)
                computed = sum(c.computed for c in exchange.choices)
                if self._progress.get(exchange) == computed:
                    exchange.comment()
                    for choice in exchange.choices:
                        self._steps.want_rows(choice)
                seen[exchange] = computed
        self._progress = seen
        self._flush_and_settle()

    def overdue(self) -> None:
        """About once a second: streams whose trailers have waited so long for the engine's last word end without, and
        what has no token in time ends, wherever it hangs."""
        late, self._unended = self._unended, [e for e in self._open if e.unended]
        for exchange in late:
            exchange.complete(now=True)
        if late:
            self._flush_and_settle()
        before_ns = self._now_ns() - self._ttft_ns if self._ttft_ns else 0
        for exchange in list(takewhile(lambda e: e.opened_ns < before_ns, self._open)):
            if not exchange.first_ns:
                self._give_up(exchange, self.silent)

    def _late(self, exchange: Exchange) -> None:
        self._give_up(exchange, self.late)

    def _give_up(self, exchange: Exchange, error: Callable[[], DeadlineExceeded]) -> None:
        """What has not been answered completely is of no use any more."""
        if exchange.state in (State.OPEN, State.RUNNING):
            self._end(exchange, error())

    def _flush_and_settle(self) -> None:
        self._flush()
        self._steps.settle_ended()
