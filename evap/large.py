"""Requests with large bodies: parsed and tokenized by the intake process, admitted here in between.

The order is that of small ones: what is wrong with the body, then whether it is admitted, then what the prompt is.
Until it is admitted there is no exchange, and its time runs here: a deadline, --ttft-timeout and a drain end it as they
end an exchange, also when the intake process hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from evap import terms
from evap.engine.interface import Text
from evap.errors import Draining, EvapError
from evap.exchange import Exchange
from evap.intake.helper import Intake, Job
from evap.messages import ParsedRequest
from evap.metering.accounts import Ticket
from evap.protocol.events import Reply, RequestHead
from evap.protocol.spool import Spool
from evap.upkeep import Upkeep
from evap.waiting import InPool, WaitingRoom


class LargeRequests:
    """`refuse`: how an error is answered that belongs to no exchange yet; set by the App."""

    def __init__(
        self, intake: Intake, text: Text, room: WaitingRoom, upkeep: Upkeep, in_pool: InPool,
        look_up: Callable[[Ticket], None],
    ) -> None:  # fmt: skip
        self._intake = intake
        self._text = text
        self._room = room
        self._upkeep = upkeep
        self._in_pool = in_pool
        self._look_up = look_up
        self._jobs: dict[Exchange, Job] = {}
        self._unparsed: dict[Job, tuple[Reply, RequestHead]] = {}
        self._deadlines = upkeep.deadlines(self._late)
        self._hung = upkeep.deadlines(self._hangs)
        self.refuse: Callable[[Reply, RequestHead, Exception], None] = lambda reply, head, error: reply.abort()

    @property
    def jobs(self) -> int:
        """Requests that are being parsed or tokenized, or wait for that."""
        return self._intake.jobs

    def take(
        self, reply: Reply, head: RequestHead, body: Spool, dialect: str,
        open_: Callable[[int, ParsedRequest], tuple[Exchange, Hashable]],
    ) -> None:  # fmt: skip
        """`open_`, given the size of the body and the request, lets it in or raises. Raises what `terms` raises, and
        Overloaded."""
        octets, deadline_ms = body.size, terms.deadline_ms(head)

        def parsed(result: ParsedRequest | Exception) -> None:
            self._forget(job)
            try:
                if isinstance(result, Exception):
                    raise result
                exchange, flow = open_(octets, result)
            except Exception as error:  # noqa: BLE001 - judged by `refuse`, like what a small request raises
                self._intake.cancel(job)
                self.refuse(reply, head, error)
            else:
                self._jobs[exchange] = job
                self._room.hold(exchange, flow, octets)
                self._encode(exchange, job)

        reply.owner = job = self._intake.parse(body, dialect, parsed)
        self._unparsed[job] = reply, head
        self._upkeep.limit(job, deadline_ms, self._deadlines, self._hung)

    def _forget(self, job: Job) -> None:
        """It is parsed, or nobody waits for it any more."""
        self._unparsed.pop(job, None)
        self._deadlines.remove(job)
        self._hung.remove(job)

    def _late(self, job: Job) -> None:
        self._intake.cancel(job)
        self._end(job, self._upkeep.late())

    def _hangs(self, job: Job) -> None:
        self._intake.hangs(job)
        self._end(job, self._upkeep.silent())

    def _end(self, job: Job, error: EvapError) -> None:
        reply, head = self._unparsed[job]
        self._forget(job)
        self.refuse(reply, head, error)

    def drain(self) -> None:
        """What is not parsed yet would be refused when it is."""
        for job in list(self._unparsed):
            self._intake.cancel(job)
            self._end(job, Draining("the server is shutting down", retry_after_s=5))

    def _encode(self, exchange: Exchange, job: Job) -> None:
        def looked_up(result: object) -> None:
            if isinstance(result, Exception):
                self._room.deliver(exchange, result)
            else:
                self._intake.encode(job, self._text.limit_tokens, partial(self._room.deliver, exchange))

        if exchange.account.lookup:
            self._in_pool(lambda: self._look_up(exchange.account), looked_up)
        else:
            looked_up(None)

    def cancelled(self, reply: Reply) -> None:
        """Its client has gone while the body was being parsed."""
        if isinstance(reply.owner, Job):
            self._forget(reply.owner)
            self._intake.cancel(reply.owner)

    def settled(self, exchange: Exchange) -> None:
        """If its prompt is still being tokenized, nobody waits for it any more."""
        job = self._jobs.pop(exchange, None)
        if job is not None:
            self._intake.cancel(job)
