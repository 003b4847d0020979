"""One request from open to settled: it joins a reply, its choices' slots, and the account. No I/O, no clock.

Rule 1: a streamed and a whole answer take the same path; a whole one is a fold over the stream.
Rule 2: `state` moves only by the table below, and settling happens once, when both hold: the engine has confirmed the
        end of every slot, and the reply has been written completely or will never be.
Rule 3: text reaches the reply through `_emit` only; a slow reader's tokens coalesce there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from evap import epilogue
from evap.choice import ChoiceRun, logprob_text
from evap.engine.interface import Detokenizer, Text
from evap.errors import EngineFailed, EvapError
from evap.messages import (
    Finish,
    LogprobText,
    ParsedRequest,
    TokenLogprobs,
    Usage,
)
from evap.metering.accounts import Ticket
from evap.outlet import Outlets
from evap.protocol.api.dialect import Renderer
from evap.protocol.events import HeaderList, Reply, RequestHead
from evap.protocol.headers import echoed
from evap.protocol.trace_context import TraceContext
from evap.states import TRANSITIONS, Input, State

__all__ = ["Exchange", "Input", "State"]

NO_STORE: Final = (b"cache-control", b"no-store")
#: stop_reason where finish_reason is "length" because the key's budget had no more tokens
BUDGET_STOP: Final = "evap:budget"
HELD_PIECES: Final = 256  #: of a slow reader's text; more are made one, for an object is larger than its token
FINISH_REASONS: Final = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class Exchange:
    """One request and its response."""

    def __init__(
        self, *, reply: Reply, head: RequestHead, request: ParsedRequest, renderer: Renderer, text: Text,
        headers: HeaderList, send_error: Callable[[Reply, EvapError, HeaderList], int], stream_buffer: int,
        opened_ns: int, account: Ticket | None = None,
    ) -> None:  # fmt: skip
        self.reply = reply
        self.head = head
        self.request = request
        self.renderer = renderer
        self.account = account or Ticket()
        self.kind = renderer.kind
        self.state = State.OPEN
        self.prompt_ids: Sequence[int] = []
        self.sampling = request.sampling
        self.choices: list[ChoiceRun] = []
        self.cached = 0
        self.trace: TraceContext | None = None
        self.opened_ns = opened_ns
        self.deadline_ns = 0  #: when it is of no use any more; 0: never
        self.submitted_ns = 0  #: when the engine was given it; 0: never
        self.first_ns = self.last_ns = 0  #: when its first and last tokens came
        self.unended = False  #: the answer is all written, and its stream not ended yet: see `complete`
        self.end = ""  #: why it ended: stop, length, client_reset, client_gone, stalled, error codes
        self.status = 0
        self.headers = headers  #: of a successful answer
        self._send_error = send_error
        self._text = text
        self._buffer = stream_buffer
        self.outlets = Outlets(reply)
        plain = not request.stop and request.sampling.logprobs is None and not request.echo
        self._scored = "prompt_logprobs" in request.sampling.extra  # the echo waits for its log probabilities
        self.cache_salt, self.adapter, self.priority = "", "", 0  #: as in GenerateRequest; set before the first submit
        #: tokens may be turned into text in any portion size, at any time
        self.plain_text = plain
        self.rows_allowed = (
            plain and request.stream and request.skip_special_tokens and not request.continuous_usage
            and text.fragments is not None and self.kind != "text"
        )  # fmt: skip

    def move(self, event: Input) -> None:
        """Take a transition. Raises KeyError for one that the table does not have: that is our bug."""
        self.state = TRANSITIONS[self.state, event]

    def can(self, event: Input) -> bool:
        return (self.state, event) in TRANSITIONS

    # A streamed answer begins

    def announce(self) -> None:
        """Send the head and the first events of a streamed answer: proxies see life before the first token."""
        self.status = 200
        outlets = self.outlets
        outlets.begin()
        pushes = outlets.headers(self.head)
        self.reply.start(200, ((b"content-type", self.renderer.stream_type), NO_STORE, *self.headers, *pushes))
        if outlets.offer is None:
            for index in range(self.request.n):
                outlets.main.send(self.renderer.prelude(index, self._continuous()))

    def begin(self) -> None:
        """A streamed answer has its choices. Nothing is promised before: a push that is reset has a choice to stop."""
        if not self.status:
            self.announce()
        echo = self.request.prompt_text if self.request.echo and not self._scored else None
        for choice in self.choices:
            if self.outlets.offer is not None:
                choice.outlet = self.outlets.place(choice.index)
                choice.outlet.send(self.renderer.prelude(choice.index, self._continuous()))
            if echo is not None:
                choice.outlet.send(self.renderer.delta(choice.index, echo))
            if self.rows_allowed:
                choice.row = self.renderer.row(choice.index)
                # Made now, while it knows where the prompt ends: a prompt may end inside a character or before a word.
                self._detokenizer(choice)

    # Tokens in

    def take_prompt(self, choice: ChoiceRun, entries: Sequence[TokenLogprobs | None]) -> None:
        """Log probabilities of an echoed prompt, before the choice's first token."""
        if choice.ended or self.state is not State.RUNNING or not self._scored:
            return
        texts = [logprob_text(self._text, i, entry) for i, entry in zip(self.prompt_ids, entries, strict=True)]
        if self.request.stream:
            choice.outlet.send(self.renderer.delta(choice.index, self.request.prompt_text or "", texts))
        else:
            choice.logprobs.extend(texts)

    def take(self, choice: ChoiceRun, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> None:
        """Tokens of one choice, in order, that did not go out as rows. May end the choice (stop string)."""
        if choice.ended or self.state is not State.RUNNING:
            return
        if not self.request.stream and self.plain_text:
            choice.ids.extend(ids)
            return
        if self.kind == "tokens":
            choice.ids.extend(ids)
            if choice.outlet.reply.buffered < self._buffer:
                self._send_ids(choice)
            return
        detokenizer = choice.detokenizer or self._detokenizer(choice)
        texts = None
        if logprobs is not None:
            texts = [logprob_text(self._text, i, entry) for i, entry in zip(ids, logprobs, strict=True)]
        text = detokenizer.push(ids)
        choice.unmarked += len(ids)
        if text or texts:
            self._emit(choice, text, texts)
        if detokenizer.stopped is not None:
            choice.emitted = detokenizer.consumed()  # a choice with stop strings is never on rows
            self._end_choice(choice, "stop", detokenizer.stopped)

    def _detokenizer(self, choice: ChoiceRun) -> Detokenizer:
        request = self.request
        choice.detokenizer = self._text.detokenizer(
            stop=request.stop, include_stop=request.include_stop, skip_special=request.skip_special_tokens,
            prompt_ids=self.prompt_ids,
        )  # fmt: skip
        return choice.detokenizer

    def finish(self, choice: ChoiceRun, finish: Finish, last_token: int | None) -> None:
        """The engine's final record. `last_token` is the token that stopped it, if it is one of the request's own."""
        if choice.ended or self.state is not State.RUNNING:
            return
        if finish not in FINISH_REASONS:
            self.fail(EngineFailed("the engine failed while it was generating this answer; the request may be retried"))
            return
        choice.emitted = choice.given
        if choice.ids and not self.request.stream:
            detokenizer = choice.detokenizer or self._detokenizer(choice)
            choice.parts.append(detokenizer.push(choice.ids))
            choice.ids = []
        tail = choice.detokenizer.finish() if choice.detokenizer is not None else ""
        if tail:
            self._emit(choice, tail, None)
        own = last_token is not None and last_token in self.sampling.stop_token_ids
        stop_reason = last_token if own and finish is Finish.STOP else None
        capped = finish is Finish.LENGTH and self.account.capped
        self._end_choice(choice, FINISH_REASONS[finish], BUDGET_STOP if capped else stop_reason)

    # Text out

    def _emit(self, choice: ChoiceRun, text: str, logprobs: list[LogprobText] | None) -> None:
        if not self.request.stream:
            choice.parts.append(text)
            choice.logprobs.extend(logprobs or ())
            return
        choice.held.append(text)
        choice.held_logprobs.extend(logprobs or ())
        if choice.outlet.reply.buffered < self._buffer:
            self._send_held(choice)
        elif len(choice.held) >= HELD_PIECES:
            choice.held = ["".join(choice.held)]

    def _send_held(self, choice: ChoiceRun) -> None:
        text, logprobs = "".join(choice.held), choice.held_logprobs
        choice.held, choice.held_logprobs = [], []
        choice.outlet.send(self.renderer.delta(choice.index, text, logprobs or None, self._continuous()))
        choice.outlet.mark(choice, choice.unmarked)

    def _send_ids(self, choice: ChoiceRun) -> None:
        ids, choice.ids = choice.ids, []
        choice.unmarked += len(ids)
        choice.outlet.send(self.renderer.tokens(ids))
        choice.outlet.mark(choice, choice.unmarked)

    def release_held(self, reply: Reply) -> None:
        """Its reader caught up: what was coalesced goes out as one event a choice."""
        for choice in self.choices:
            if choice.outlet.reply is not reply:
                continue
            if choice.held:
                self._send_held(choice)
            elif choice.ids and self.request.stream:
                self._send_ids(choice)

    def delivered(self, choice: ChoiceRun) -> int:
        """Tokens of a running choice that the transport has taken, as of now."""
        choice.outlet.settle()
        return choice.delivered + choice.row_delivered

    def comment(self) -> None:
        """An SSE comment: proxies and clients that time out on silence see life; nobody counts it."""
        if self.kind == "sse" and self.reply.buffered == 0:
            self.outlets.main.send(b": waiting\n\n")

    # Ends

    def _end_choice(self, choice: ChoiceRun, reason: str, stop_reason: str | int | None) -> None:
        choice.ended = True
        choice.reason, choice.stop_reason = reason, stop_reason
        last = all(c.ended for c in self.choices)
        if self.request.stream:
            outlet = choice.outlet
            self.release_held(outlet.reply)
            outlet.send(self.renderer.finish(choice.index, reason, stop_reason, self._continuous()))
            if last:
                self._close()
            # The end token, and tokens whose text a stop string swallowed, arrive with the finish_reason.
            outlet.mark(choice, choice.emitted - choice.marked - choice.row_delivered)
            self.outlets.end(outlet)
        if last:
            self._answer(reason)

    def _close(self) -> None:
        """What follows the last choice's finish_reason."""
        if self.request.include_usage:
            outlet = self.outlets.place(len(self.choices))
            outlet.send(self.renderer.usage(self.usage()))
            self.outlets.end(outlet)
        self.outlets.main.send(epilogue.comment(self) + self.renderer.done())

    def lose(self, reply: Reply, reason: str) -> Sequence[ChoiceRun]:
        """The client does not want one of the pushes: what still runs for it ends here, and is returned."""
        outlet = self.outlets.lose(reply)
        if self.state is not State.RUNNING:
            return ()
        lost = [choice for choice in self.choices if choice.outlet is outlet and not choice.ended]
        for choice in lost:
            choice.ended, choice.emitted = True, choice.given
        if lost and all(c.ended for c in self.choices):
            self._close()
            self._answer(next((c.reason for c in self.choices if c.reason is not None), reason))
        return lost

    def _answer(self, reason: str) -> None:
        self.end = reason
        if self.request.stream:
            self.unended = True
            self.complete()
        else:
            echoed = (self.request.prompt_text or "") if self.request.echo else ""
            scored = self.request.sampling.logprobs is not None
            body = self.renderer.whole([c.answer(echoed, scored=scored) for c in self.choices], self.usage())
            self.status = 200
            kind, main = (b"content-type", self.renderer.whole_type), self.outlets.main
            headers = (kind, *self.headers, *self.outlets.headers(self.head), *epilogue.headers(self))
            main.whole(headers, body)
            for choice in self.choices:
                main.mark(choice, choice.emitted)
        self.move(Input.ANSWER)

    def complete(self, *, now: bool = False) -> None:
        """End a stream that is all written. Trailers wait for the engine's last word on every choice (after a stop
        string it computes for a step more), unless it must be `now`."""
        if self.unended and (now or all(c.final for c in self.choices) or not epilogue.takes_trailers(self)):
            self.unended = False
            self.reply.end(epilogue.trailers(self))

    def fail(self, error: EvapError) -> None:
        """Answer with an error: whole if nothing was sent, as an event if the stream runs."""
        if self.state not in (State.OPEN, State.RUNNING):
            return
        self.end = error.code or "error"
        if self.status == 0:
            self.status = self._send_error(self.reply, error, echoed(self.head))
        elif self.kind == "sse":
            for choice in self.choices:
                choice.held.clear()
            self.outlets.fail(self.renderer.error(error))
            self.outlets.main.send(self.renderer.done())
            self.unended = True
            self.complete()
        else:
            self.outlets.main.lose()
            self.reply.abort()  # text and tokens cannot say "error": the stream must not look complete
        self.move(Input.ANSWER)

    def cancel(self, reason: str) -> None:
        """The client no longer wants it."""
        if self.can(Input.CANCEL):
            self.unended = False
            self.end = reason
            self.move(Input.CANCEL)

    @property
    def finished(self) -> bool:
        """May be settled: no slot is out, and no byte that could still be delivered."""
        if self.state not in (State.ANSWERED, State.CANCELLED) or not all(c.released for c in self.choices):
            return False
        return self.state is State.CANCELLED or (not self.unended and self.outlets.drained)

    @property
    def ending(self) -> str:
        """Why it ended, as accounts say it: "budget" where the key's budget made the length."""
        return "budget" if self.end == "length" and self.account.capped else self.end

    def _continuous(self) -> Usage | None:
        return self.usage() if self.request.continuous_usage else None

    def part(self) -> None:
        """Settled, and nobody calls any more: without cycles it is freed at once, not when the collector comes."""
        self.reply.owner = None
        self.choices = []

    def usage(self) -> Usage:
        """Exact counts as of now. emitted of a running choice is all that it was given."""
        self.outlets.settle()
        emitted = [c.emitted if c.ended else c.given for c in self.choices]
        delivered = [min(c.delivered + c.row_delivered, e) for c, e in zip(self.choices, emitted, strict=True)]
        return Usage(
            prompt=len(self.prompt_ids), cached=self.cached, computed=sum(c.computed for c in self.choices),
            emitted=sum(emitted), delivered=sum(delivered),
        )  # fmt: skip
