"""One choice of a request: a slot in the engine and the text that came of it.

Only data, and a token's log probabilities as text; `exchange.py` has the rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from evap.engine.interface import Detokenizer, Text
from evap.messages import UNPREDICTED, Choice, GenerateRequest, LogprobText, TokenLogprobs

if TYPE_CHECKING:
    from evap.exchange import Exchange


class ChoiceRun:
    """One choice: a slot in the engine and the text that came of it."""

    __slots__ = (
        "computed", "delivered", "detokenizer", "emitted", "ended", "exchange", "final", "generation", "given", "held",
        "held_logprobs", "ids", "index", "logprobs", "marked", "outlet", "parts", "reason", "released", "row",
        "row_delivered", "slot", "stop_reason", "unmarked",
    )  # fmt: skip

    def __init__(self, exchange: Exchange, index: int) -> None:
        self.exchange = exchange
        self.index = index
        self.outlet = exchange.outlets.main  #: where its bytes go
        self.slot = -1
        self.generation = 0
        self.detokenizer: Detokenizer | None = None
        self.ids: list[int] = []  # whole answers: tokens not yet turned into text
        self.parts: list[str] = []  # whole answers: text
        self.logprobs: list[LogprobText] = []
        self.held: list[str] = []  # slow readers: text to be coalesced
        self.held_logprobs: list[LogprobText] = []
        self.row: tuple[bytes, bytes] | None = None  #: constant parts of its rows; None: this choice takes none
        self.given = 0  #: tokens that came from the engine
        self.computed = 0  #: tokens that the engine has sampled: those, and what it counts beyond them
        self.emitted = 0
        self.unmarked = 0  #: tokens taken whose text has not been given to the reply
        self.marked = 0  #: tokens whose text has
        self.delivered = 0  #: of those, taken by the transport
        self.row_delivered = 0  #: tokens that went out as rows
        self.reason: str | None = None
        self.stop_reason: str | int | None = None
        self.ended = False  #: the answer has its finish_reason
        self.final = False  #: the engine has confirmed the end: `computed` changes no more
        self.released = False  #: and the slot has been given back

    def request(self) -> GenerateRequest:
        """Choices of one request share the prompt; a seed is offset by the choice, so that each differs."""
        asked = self.exchange
        sampling = asked.sampling
        if self.index and sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + self.index) % (1 << 63))
        return GenerateRequest(
            prompt_ids=asked.prompt_ids, sampling=sampling, priority=asked.priority, cache_salt=asked.cache_salt,
            adapter=asked.adapter,
        )  # fmt: skip

    def answer(self, echoed: str, *, scored: bool) -> Choice:
        """A whole answer's choice, behind `echoed`; with log probabilities if `scored`."""
        return Choice(
            index=self.index, text=echoed + "".join(self.parts), finish_reason=self.reason or "error",
            stop_reason=self.stop_reason, logprobs=self.logprobs if scored else None,
        )  # fmt: skip


def logprob_text(text: Text, token: int, entry: TokenLogprobs | None) -> LogprobText:
    """A token with its alternatives, as an API shows them. None: nothing predicts it (the first of a prompt)."""
    known = entry if entry is not None else TokenLogprobs(logprob=UNPREDICTED)
    alternatives = [(text.token_bytes(other.token), other.logprob) for other in known.top]
    data = text.token_bytes(token)
    return LogprobText(
        text=data.decode(errors="replace"),
        logprob=known.logprob,
        data=data,
        top=tuple((other.decode(errors="replace"), logprob, other) for other, logprob in alternatives),
    )
