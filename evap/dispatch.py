"""Requests in: validate, admit, tokenize, submit; and what ends them early: cancel, failure, drain.

Everything runs on the loop's thread and nothing awaits. Work on large prompts is handed to a pool and comes back as a
call. What engine steps do to running exchanges is in `steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from evap import terms
from evap.accounting import Accounting
from evap.admission import FULL, PUSHED, SHARE
from evap.blocks import BlockStore
from evap.config import Config
from evap.engine.interface import Replica, Text, check_request
from evap.errors import (
    ContextOverflow,
    Draining,
    EngineUnavailable,
    EvapError,
    InternalError,
    NotFound,
    echo,
)
from evap.exchange import Exchange, Input, State
from evap.identity import Identity
from evap.intake.helper import QUEUE_FULL, Intake
from evap.large import LargeRequests
from evap.messages import ParsedRequest, Prompt, ReplicaState, SamplingParams
from evap.metering.accounts import Account
from evap.metrics import Live
from evap.outlet import Offer
from evap.protocol import trace_context
from evap.protocol.api.dialect import Dialect
from evap.protocol.api.media import check_body, negotiate
from evap.protocol.events import HeaderList, Reply, RequestHead
from evap.protocol.headers import echoed
from evap.protocol.rows import RowTable
from evap.protocol.spool import Body, Spool
from evap.steps import Steps
from evap.upkeep import Upkeep
from evap.waiting import INLINE_BODY_BYTES, WaitingRoom, flow_of

#: an error's code -> the limit, as it is counted
_LIMIT_OF: Final = {
    "too_many_streams": "key_streams", "rate_limit_exceeded": "key_rate", "insufficient_quota": "key_budget",
    QUEUE_FULL: "large_queue",
}  # fmt: skip
#: The names of all limits of this side of the wire: a closed list.
LIMITS: Final = (SHARE, FULL, PUSHED, "deadline", "ttft", *_LIMIT_OF.values())


@dataclass(frozen=True, slots=True)
class Shell:
    """What the loop gives: nothing in this file knows asyncio or a clock."""

    now_ns: Callable[[], int]
    wall_s: Callable[[], float]
    #: run in a thread, then call back on the loop with the result or the exception
    in_pool: Callable[[Callable[[], Any], Callable[[Any], None]], None]
    #: call on the next pass of the loop
    soon: Callable[[Callable[[], None]], object]
    #: call after so many seconds
    later: Callable[[float, Callable[[], None]], object]
    #: write what every connection has to write, now
    flush: Callable[[], None]
    settled: Callable[[Exchange], None]
    log_exception: Callable[[str], None]
    #: answer with a whole error, and more fields for its head; returns the status
    send_error: Callable[[Reply, EvapError, HeaderList], int]


class Dispatch:
    """All exchanges of a process."""

    def __init__(
        self, config: Config, *, text: Text, replica: Replica, rows: RowTable, model: str, shell: Shell,
        accounting: Accounting | None = None, live: Live | None = None, intake: Intake | None = None,
        limits: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.text = text
        self.replica = replica
        self.model = model
        self.draining = False
        self.limits = limits or dict.fromkeys(LIMITS, 0)  #: how often each has refused or ended one
        self.open: dict[Exchange, None] = {}  # until settled
        self.accounting = accounting or Accounting(config.meter, model=model, slots=rows.max_slots, now_ns=shell.now_ns,
                                                   wall_ns=lambda: int(shell.wall_s() * 1e9))  # fmt: skip
        self.steps = Steps(
            text=text, rows=rows, cancel=replica.cancel, flush=shell.flush, now_ns=shell.now_ns, settled=self._settled,
            table=self.accounting.table, pages=self.accounting.pages, enter=self.accounting.enter, live=live,
        )  # fmt: skip
        protocol = config.protocol
        self.blocks = BlockStore(
            limit=protocol.push_memory_bytes, keep_ns=int(protocol.push_keep_s * 1e9), now_ns=shell.now_ns
        )
        self._config = config
        self._shell = shell
        self.room = WaitingRoom(
            config.engine, slots=self.steps.slots, now_ns=shell.now_ns, in_pool=shell.in_pool, soon=shell.soon,
            tokenize=self._tokenize, prepared=self._prepared, refuse=self._refuse, counts=self.limits,
        )  # fmt: skip
        self.steps.freed = self.room.pump
        self.upkeep = Upkeep(
            self.open, steps=self.steps, flush=shell.flush, now_ns=shell.now_ns, later=shell.later, end=self._refuse,
            counts=self.limits, ttft_s=config.engine.ttft_timeout_s,
        )  # fmt: skip
        self.identity = Identity()
        pool, look_up = shell.in_pool, self.accounting.look_up
        self.large = LargeRequests(intake, text, self.room, self.upkeep, pool, look_up) if intake else None

    def engine_ready(self) -> None:
        """The engine says what it is, now or again."""
        info = self.replica.info
        self.steps.grow(info.vocab_size)
        self.room.engine_runs(info.max_running)
        self._shell.soon(self.room.pump)
        self.text.limit_tokens = info.max_model_len - 1

    def engine_lost(self) -> None:
        """No replica is ready. What waits is not kept for one that may never come: others can serve it now."""
        for exchange in self.room.line.items():
            self._refuse(exchange, self._unavailable())

    # A request comes in

    def generate(
        self, reply: Reply, head: RequestHead, body: Body, dialect: Dialect, account: Account | None = None,
        name: str = "",
    ) -> None:  # fmt: skip
        """Validate, admit, tokenize, submit. Raises EvapError for what is refused at once (the caller answers).

        name: of the dialect; a large body (a Spool) is parsed by another process, which knows it by name.
        """
        headers = echoed(head)
        check_body(head.get(b"content-type"), head.get(b"content-encoding"))
        if isinstance(body, Spool):
            assert self.large is not None
            self.may_wait(account, head, reply.core, body.size)
            opened = partial(self._open, reply, head, headers, dialect, account, self._shell.now_ns())
            self.large.take(reply, head, body, name, opened)
            return
        request, octets = dialect.parse(body, max_choices=self._config.engine.max_choices), len(body)
        exchange, flow = self._open(reply, head, headers, dialect, account, self._shell.now_ns(), octets, request)
        self.room.enter(exchange, flow, octets, pooled=octets >= INLINE_BODY_BYTES or exchange.account.lookup)

    def _open(
        self, reply: Reply, head: RequestHead, headers: HeaderList, dialect: Dialect, account: Account | None,
        opened_ns: int, octets: int, request: ParsedRequest,
    ) -> tuple[Exchange, Hashable]:  # fmt: skip
        """A valid request is let in; also for whom it waits. Raises EvapError."""
        deadline_ms = terms.deadline_ms(head)
        kind = negotiate(head.get(b"accept"), request.stream)
        adapter = self._adapter(request.model)
        flow = self.may_wait(account, head, reply.core, octets)
        renderer = dialect.renderer(
            request, kind=kind, id_suffix=self.identity.new_id(), model=adapter or self.model,
            created_s=int(self._shell.wall_s()),
        )  # fmt: skip
        ticket = self.accounting.admit(account, head, renderer.id, adapter)
        exchange = Exchange(
            reply=reply, head=head, request=request, renderer=renderer, text=self.text, headers=headers,
            send_error=self._shell.send_error, stream_buffer=self._config.protocol.stream_buffer_bytes,
            opened_ns=opened_ns, account=ticket,
        )  # fmt: skip
        exchange.trace = trace_context.of(head, self._config.server.otel_endpoint, self._config.server.otel_sample)
        exchange.adapter, exchange.cache_salt = adapter, self.identity.cache_salt(ticket.key_id)
        exchange.priority = terms.priority(account, head, request)
        if head.get(b"evap-push") == b"blocks" and request.stream and request.n > 1 and kind == "sse":
            exchange.outlets.offer = Offer(self.blocks, f"{head.path}/{renderer.id}/blocks", ticket.key_id)
        reply.owner = exchange
        self.open[exchange] = None
        self.accounting.running[renderer.id] = exchange
        if deadline_ms:
            self.upkeep.expect(exchange, exchange.opened_ns + deadline_ms * 1_000_000)
        return exchange, flow

    def _adapter(self, model: str | None) -> str:
        """The adapter that a request names as its model, "" for the model itself."""
        if model is None or model == self.model:
            return ""
        if model in self.replica.adapters:
            return model
        raise NotFound(f"the model '{echo(model)}' does not exist", param="model", code="model_not_found")

    def may_wait(self, account: Account | None, head: RequestHead, connection: object, octets: int) -> Hashable:
        """For whom a request with such a body waits. Raises what refuses it, before anything is made of it."""
        if self.draining:
            raise Draining("the server is shutting down", retry_after_s=5)
        if self.replica.state is not ReplicaState.READY:
            raise self._unavailable()
        flow = flow_of(account.key.id if account is not None else "", head.peer, connection)
        large = self.large is not None and octets > self._config.protocol.large_body_bytes
        self.room.check(flow, octets, pooled=octets >= INLINE_BODY_BYTES and not large)
        return flow

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable("the engine is not ready", retry_after_s=5)

    def _tokenize(self, exchange: Exchange) -> Prompt:
        request = exchange.request
        if exchange.account.lookup:
            self.accounting.look_up(exchange.account)
        if request.messages is not None:
            return Prompt.of(self.text.chat_ids(request.messages, dict(request.template_args)))
        if request.prompt_ids is not None:
            return Prompt.of(list(request.prompt_ids))
        return Prompt.of(self.text.encode(request.prompt_text or ""))

    def _prepared(self, exchange: Exchange, result: Prompt | Exception) -> None:
        """It has its ids (or cannot have them), and there is a place for it."""
        try:
            if isinstance(result, Exception):
                raise result
            self._submit(exchange, result)
        except EvapError as error:
            self._refuse(exchange, error)
        except Exception:  # noqa: BLE001 - whatever a template or tokenizer raises must not stop the loop
            self._shell.log_exception("a request could not be prepared")
            self._refuse(exchange, InternalError("the request could not be prepared"))

    def note(self, error: EvapError) -> None:
        """Count the limit that has refused something, where nobody else does."""
        if (limit := _LIMIT_OF.get(error.code or "")) is not None:
            self.limits[limit] += 1

    def _refuse(self, exchange: Exchange, error: EvapError) -> None:
        """Answer with an error, and have the engine forget it."""
        self.note(error)
        exchange.fail(error)
        self._abandon(exchange)

    def _submit(self, exchange: Exchange, prompt: Prompt) -> None:
        if prompt.text is not None:
            exchange.request = msgspec.structs.replace(exchange.request, prompt_text=prompt.text)
        request, prompt_ids = exchange.request, prompt.ids
        sampling = self._complete(request, len(prompt_ids))
        check_request(self.replica.info, self.text.eos_ids, sampling, prompt)
        self.replica.check(sampling, prompt_ids)
        if self.replica.state is not ReplicaState.READY:
            raise self._unavailable()
        sampling = self.accounting.reserve(exchange, sampling, len(prompt_ids))
        exchange.prompt_ids, exchange.sampling = prompt_ids, sampling
        exchange.choices = [self.steps.add(exchange, index) for index in range(request.n)]
        self.accounting.opened(exchange, self._shell.soon)
        exchange.submitted_ns = self._shell.now_ns()
        exchange.move(Input.SUBMIT)
        if request.stream:
            exchange.begin()
            for choice in exchange.choices:
                self.steps.want_rows(choice)
        for choice in exchange.choices:
            self.replica.submit(choice.slot, choice.generation, choice.request())

    def _complete(self, request: ParsedRequest, prompt: int) -> SamplingParams:
        """The model's own defaults; max_tokens against the context. Raises ContextOverflow naming both numbers."""
        info, max_tokens = self.replica.info, request.max_tokens
        context = info.max_model_len
        room = context - prompt
        if room < 1 or (max_tokens is not None and max_tokens > room):
            wanted = f"{prompt} in the prompt" + (f" and {max_tokens} to generate" if max_tokens is not None else "")
            raise ContextOverflow(
                f"the model's context is {context} tokens, but the request asks for "
                f"{prompt + (max_tokens or 1)} ({wanted})",
                param="max_tokens" if max_tokens is not None and room >= 1 else request.prompt_field,
            )
        if max_tokens is None:
            max_tokens = min(room, info.default_max_tokens or room)
        own = info.sampling_defaults
        changes = {name: own[name] for name in request.left_open if name in own} if own else {}
        return msgspec.structs.replace(request.sampling, max_tokens=max_tokens, **changes)

    # What ends exchanges early

    def cancelled(self, reply: Reply, reason: str) -> None:
        """StreamCancelled: the engine hears of it at once, also while it is silent."""
        exchange = reply.owner
        if not isinstance(exchange, Exchange):
            if self.large is not None:
                self.large.cancelled(reply)
        elif reply is not exchange.reply:
            self.steps.lose(exchange, reply, reason)
            self._shell.soon(self._flush_and_settle)
        elif exchange.can(Input.CANCEL):
            self.room.leave(exchange)
            self.steps.cancel(exchange, reason)
            self._shell.soon(self.steps.settle_ended)

    def window_opened(self, reply: Reply) -> None:
        """WindowOpened: a slow reader has caught up, or has read to the end."""
        exchange = reply.owner
        if not isinstance(exchange, Exchange):
            return
        if exchange.state is State.RUNNING:
            exchange.release_held(reply)
            for choice in exchange.choices:
                if not choice.ended and choice.outlet.reply is reply:
                    self.steps.want_rows(choice)
        else:
            self._shell.soon(self.steps.settle_ended)

    def prioritized(self, reply: Reply, value: bytes) -> None:
        """PriorityChanged: what waits here moves; the engine keeps the order that it was given."""
        exchange = reply.owner
        if isinstance(exchange, Exchange) and exchange.state is State.OPEN:
            exchange.priority = terms.priority(exchange.account.account, exchange.head, exchange.request, value)
            self.room.line.move(exchange, exchange.priority)

    def fail_all(self, error: EvapError) -> None:
        """Every open exchange ends with this error (drain deadline)."""
        for exchange in list(self.open):
            if exchange.state in (State.OPEN, State.RUNNING):
                self._refuse(exchange, error)
        self._shell.flush()

    def _abandon(self, exchange: Exchange) -> None:
        self.room.leave(exchange)
        self.steps.abandon(exchange)
        self._shell.soon(self._flush_and_settle)

    def _flush_and_settle(self) -> None:
        self._shell.flush()
        self.steps.settle_ended()

    def _settled(self, exchanges: Sequence[Exchange]) -> None:
        for exchange in exchanges:
            del self.open[exchange]
            self.upkeep.settled(exchange)
            if self.large is not None:
                self.large.settled(exchange)
        self.accounting.settle(exchanges, self._shell.now_ns())
        for exchange in exchanges:
            self._shell.settled(exchange)

    @property
    def ending(self) -> bool:
        """There are answers that are all written, and whose streams have not ended yet."""
        return any(e.unended for e in self.open)

    @property
    def active(self) -> Sequence[Exchange]:
        """Exchanges that still owe an answer."""
        return [e for e in self.open if e.state in (State.OPEN, State.RUNNING)]
