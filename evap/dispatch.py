"""Requests in: validate, admit, tokenize, submit; and what ends them early: cancel, failure, drain.

Everything runs on the loop's thread and nothing awaits. Work on large prompts is handed to a pool and comes back as a
call. What engine steps do to running exchanges is in `steps.py`.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from evap.accounting import Accounting
from evap.config import Config
from evap.engine.interface import Replica, Text, check_request
from evap.errors import (
    ContextOverflow,
    Draining,
    EngineUnavailable,
    EvapError,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    echo,
)
from evap.exchange import Exchange, Input, State
from evap.messages import ReplicaState, SamplingParams
from evap.metering.accounts import Account
from evap.metrics import Live
from evap.protocol.api.dialect import Dialect
from evap.protocol.api.media import check_body, negotiate
from evap.protocol.events import HeaderList, Reply, RequestHead
from evap.protocol.rows import RowTable
from evap.steps import Steps

#: prompts in bodies shorter than this are tokenized on the loop: a thread switch would cost more
INLINE_BODY_BYTES: Final = 8 << 10
MAX_REQUEST_ID_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Shell:
    """What the loop gives: nothing in this file knows asyncio or a clock."""

    now_ns: Callable[[], int]
    wall_s: Callable[[], float]
    #: run in a thread, then call back on the loop with the result or the exception
    in_pool: Callable[[Callable[[], Any], Callable[[Any], None]], None]
    #: call on the next pass of the loop
    soon: Callable[[Callable[[], None]], object]
    #: write what every connection has to write, now
    flush: Callable[[], None]
    settled: Callable[[Exchange], None]
    log_exception: Callable[[str], None]
    #: answer with a whole error; returns the status
    send_error: Callable[[Reply, EvapError], int]


class Dispatch:
    """All exchanges of a process."""

    def __init__(
        self,
        config: Config,
        *,
        text: Text,
        replica: Replica,
        rows: RowTable,
        model: str,
        shell: Shell,
        accounting: Accounting | None = None,
        live: Live | None = None,
    ) -> None:
        self.text = text
        self.replica = replica
        self.model = model
        self.draining = False
        self.open: dict[Exchange, None] = {}  # until settled
        self.accounting = accounting or Accounting(config.meter, model=model, slots=rows.max_slots, now_ns=shell.now_ns,
                                                   wall_ns=lambda: int(shell.wall_s() * 1e9))  # fmt: skip
        self.steps = Steps(
            text=text, rows=rows, cancel=replica.cancel, flush=shell.flush, now_ns=shell.now_ns, settled=self._settled,
            table=self.accounting.table, pages=self.accounting.pages, live=live,
        )  # fmt: skip
        self._config = config
        self._shell = shell
        self._tokenizing = 0  # choices of exchanges whose prompt is in the pool
        self._progress: dict[Exchange, int] = {}
        self._ids: list[str] = []
        self._unended: list[Exchange] = []  # when `overdue` looked last
        self._secret = os.urandom(32)

    def engine_ready(self) -> None:
        """The engine says what it is, now or again."""
        info = self.replica.info
        self.steps.grow(info.vocab_size)
        self.text.limit_tokens = info.max_model_len - 1

    # A request comes in

    def generate(
        self, reply: Reply, head: RequestHead, body: bytes, dialect: Dialect, account: Account | None = None
    ) -> None:
        """Validate, admit, tokenize, submit. Raises EvapError for what is refused at once (the caller answers)."""
        headers = self._echoed(head)
        check_body(head.get(b"content-type"), head.get(b"content-encoding"))
        request = dialect.parse(body, max_choices=self._config.engine.max_choices)
        kind = negotiate(head.get(b"accept"), request.stream)
        adapter = self._adapter(request.model)
        self._admit(request.n)
        renderer = dialect.renderer(
            request,
            kind=kind,
            id_suffix=self._ids.pop() if self._ids else self._new_id(),
            model=adapter or self.model,
            created_s=int(self._shell.wall_s()),
        )
        ticket = self.accounting.admit(account, head, renderer.id, adapter)
        exchange = Exchange(
            reply=reply, head=head, request=request, renderer=renderer, text=self.text, headers=headers,
            send_error=self._shell.send_error, stream_buffer=self._config.protocol.stream_buffer_bytes,
            opened_ns=self._shell.now_ns(), account=ticket,
        )  # fmt: skip
        exchange.adapter, exchange.cache_salt = adapter, self._cache_salt(ticket.key_id)
        reply.owner = exchange
        self.open[exchange] = None
        self.accounting.running[renderer.id] = exchange
        self._tokenizing += request.n
        if len(body) < INLINE_BODY_BYTES and not ticket.lookup:
            try:
                ids: list[int] | Exception = self._tokenize(exchange)
            except Exception as error:  # noqa: BLE001 - judged in _tokenized, as when it comes from the pool
                ids = error
            self._tokenized(exchange, ids)
        else:
            self._shell.in_pool(lambda: self._tokenize(exchange), lambda result: self._tokenized(exchange, result))

    def _adapter(self, model: str | None) -> str:
        """The adapter that a request names as its model, "" for the model itself."""
        if model is None or model == self.model:
            return ""
        if model in self.replica.adapters:
            return model
        raise NotFound(f"the model '{echo(model)}' does not exist", param="model", code="model_not_found")

    def _cache_salt(self, key_id: str) -> str:
        """What separates the prefix caches of keys: no client can choose it, or compute another's."""
        return hashlib.blake2b(key_id.encode(), key=self._secret, digest_size=12).hexdigest() if key_id else ""

    def _new_id(self) -> str:
        """24 unguessable characters; made by the hundred, because a system call each costs more than all the rest."""
        text = base64.urlsafe_b64encode(os.urandom(18 * 128)).decode()
        self._ids = [text[i : i + 24] for i in range(0, len(text), 24)]
        return self._ids.pop()

    def _echoed(self, head: RequestHead) -> HeaderList:
        """A client's X-Request-Id is echoed and never used as a key."""
        request_id = head.get(b"x-request-id")
        if request_id is None:
            return ()
        if len(request_id) > MAX_REQUEST_ID_BYTES:
            raise InvalidRequest(f"X-Request-Id is longer than {MAX_REQUEST_ID_BYTES} bytes", param="x-request-id")
        return ((b"x-request-id", request_id),)

    def _admit(self, n: int) -> None:
        if self.draining:
            raise Draining("the server is shutting down", retry_after_s=5)
        if self.replica.state is not ReplicaState.READY:
            raise EngineUnavailable("the engine is not ready", retry_after_s=5)
        engine = self._config.engine
        slots = self.steps.slots
        busy = self._tokenizing + slots.size - slots.free
        if busy + n > min(engine.max_running + engine.max_queued, slots.size):
            raise Overloaded(f"{busy} generations are running or waiting; try again later", retry_after_s=1)

    def _tokenize(self, exchange: Exchange) -> list[int]:
        request = exchange.request
        if exchange.account.lookup:
            self.accounting.look_up(exchange.account)
        if request.messages is not None:
            return self.text.chat_ids(request.messages, dict(request.template_args))
        if request.prompt_ids is not None:
            return list(request.prompt_ids)
        return self.text.encode(request.prompt_text or "")

    def _tokenized(self, exchange: Exchange, result: list[int] | Exception) -> None:
        self._tokenizing -= exchange.request.n
        if exchange.state is not State.OPEN:  # the client left while its prompt was in the pool
            return
        try:
            if isinstance(result, Exception):
                raise result
            self._submit(exchange, result)
        except EvapError as error:
            self._refuse(exchange, error)
        except Exception:  # noqa: BLE001 - whatever a template or tokenizer raises must not stop the loop
            self._shell.log_exception("a request could not be prepared")
            self._refuse(exchange, InternalError("the request could not be prepared"))

    def _refuse(self, exchange: Exchange, error: EvapError) -> None:
        """Answer with an error before any token."""
        exchange.fail(error)
        self._abandon(exchange)

    def _submit(self, exchange: Exchange, prompt_ids: list[int]) -> None:
        request = exchange.request
        sampling = self._complete(request.sampling, request.max_tokens, len(prompt_ids))
        check_request(self.replica.info, self.text.eos_ids, sampling, prompt_ids)
        self.replica.check(sampling, prompt_ids)
        self._admit(request.n)
        sampling = self.accounting.reserve(exchange, sampling, len(prompt_ids))
        exchange.prompt_ids, exchange.sampling = prompt_ids, sampling
        exchange.choices = [self.steps.add(exchange, index) for index in range(request.n)]
        self.accounting.opened(exchange)
        exchange.submitted_ns = self._shell.now_ns()
        exchange.move(Input.SUBMIT)
        if request.stream:
            exchange.begin()
            for choice in exchange.choices:
                self.steps.want_rows(choice)
        for choice in exchange.choices:
            self.replica.submit(choice.slot, choice.generation, exchange.request_for(choice.index))

    def _complete(self, sampling: SamplingParams, max_tokens: int | None, prompt: int) -> SamplingParams:
        """max_tokens against the context. Raises ContextOverflow naming both numbers."""
        context = self.replica.info.max_model_len
        room = context - prompt
        if room < 1 or (max_tokens is not None and max_tokens > room):
            wanted = f"{prompt} in the prompt" + (f" and {max_tokens} to generate" if max_tokens is not None else "")
            raise ContextOverflow(
                f"the model's context is {context} tokens, but the request asks for "
                f"{prompt + (max_tokens or 1)} ({wanted})",
                param="max_tokens" if max_tokens is not None and room >= 1 else "messages",
            )
        return msgspec.structs.replace(sampling, max_tokens=max_tokens if max_tokens is not None else room)

    # What ends exchanges early

    def cancelled(self, reply: Reply, reason: str) -> None:
        """StreamCancelled: the engine hears of it at once, also while it is silent."""
        exchange = reply.owner
        if isinstance(exchange, Exchange) and exchange.can(Input.CANCEL):
            self.steps.cancel(exchange, reason)
            self._shell.soon(self.steps.settle_ended)

    def window_opened(self, reply: Reply) -> None:
        """WindowOpened: a slow reader has caught up."""
        exchange = reply.owner
        if not isinstance(exchange, Exchange):
            return
        if exchange.state is State.RUNNING:
            exchange.release_held()
            for choice in exchange.choices:
                if not choice.ended:
                    self.steps.want_rows(choice)
        else:
            self._shell.soon(self.steps.settle_ended)

    def fail_all(self, error: EvapError) -> None:
        """Every open exchange ends with this error (drain deadline)."""
        for exchange in list(self.open):
            if exchange.state in (State.OPEN, State.RUNNING):
                self._refuse(exchange, error)
        self._shell.flush()

    def _abandon(self, exchange: Exchange) -> None:
        self.steps.abandon(exchange)
        self._shell.soon(self._flush_and_settle)

    def _flush_and_settle(self) -> None:
        self._shell.flush()
        self.steps.settle_ended()

    def _settled(self, exchange: Exchange) -> None:
        del self.open[exchange]
        self._progress.pop(exchange, None)
        self.accounting.settled(exchange, exchange.usage(), self._shell.now_ns())
        self._shell.settled(exchange)

    def tick(self) -> None:
        """Every keepalive period: a streamed answer that has been silent since the last tick gets an SSE comment."""
        seen: dict[Exchange, int] = {}
        for exchange in self.open:
            if exchange.state is State.RUNNING and exchange.request.stream:
                self.steps.counts(exchange)
                computed = sum(c.computed for c in exchange.choices)
                if self._progress.get(exchange) == computed:
                    exchange.comment()
                    for choice in exchange.choices:
                        self.steps.want_rows(choice)
                seen[exchange] = computed
        self._progress = seen
        self._shell.flush()
        self.steps.settle_ended()

    def overdue(self) -> None:
        """About once a second: streams whose trailers have waited so long for the engine's last word end without."""
        late, self._unended = self._unended, [e for e in self.open if e.unended]
        for exchange in late:
            exchange.complete(now=True)
        if late:
            self._flush_and_settle()

    @property
    def ending(self) -> bool:
        """There are answers that are all written, and whose streams have not ended yet."""
        return any(e.unended for e in self.open)

    @property
    def active(self) -> Sequence[Exchange]:
        """Exchanges that still owe an answer."""
        return [e for e in self.open if e.state in (State.OPEN, State.RUNNING)]
