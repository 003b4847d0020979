"""What a replica must give, and what it may expect. Engines differ behind this file and nowhere else.

Contract of a replica:
- `submit` and `cancel` return at once and are called from the loop's thread only.
- Every submitted slot gets exactly one record with a Finish in its flags, also after a cancel, a crash or an
  out-of-memory (then Finish.ERROR). Only after that record may the slot be submitted again (with a new generation).
- `cancel` of a slot or generation the replica does not know, or that has ended, is ignored.
- Records of one slot come in order, `index` from 0 without gaps; the final one may carry a token or NO_TOKEN.
- All callbacks come on the loop's thread, one `on_batch` per engine step (never per token).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from evap.engine.meter import Spec
from evap.errors import InvalidRequest, echo
from evap.messages import EngineInfo, GenerateRequest, Prompt, ReplicaState, SamplingParams, TokenBatch

OnBatch = Callable[[TokenBatch], None]
#: state, one readable line (progress while starting, the reason when failed)
OnState = Callable[[ReplicaState, str], None]
#: What a process must know to reach an engine that another one has started; each kind of engine has names of its own.
How = dict[str, str | int]
#: how, what the engine is, and descriptors, which are copied
Hand = Callable[[How, EngineInfo, Sequence[int]], None]


class Replica(Protocol):
    """One engine instance.

    meters: the page of each of its `engines`, set before `start`; without them nothing is metered.
    """

    meters: Sequence[Spec]

    @property
    def state(self) -> ReplicaState: ...
    @property
    def info(self) -> EngineInfo:
        """Valid once state has been READY. Raises RuntimeError before."""
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """Names, beside the model's own, that a request may ask for (LoRA); most engines have none."""
        ...

    @property
    def engines(self) -> int:
        """Processes that sample tokens, each of which writes a counters page of its own; 0: it samples in the loop."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """May sample tokens beyond an end, which are thrown away (but counted)."""
        ...

    def check(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """What this engine refuses beyond `check_request`. Raises InvalidRequest; called once READY."""
        ...

    def listen(self, on_batch: OnBatch, on_state: OnState) -> None:
        """Set the callbacks; called once, before `start`."""
        ...

    async def start(self) -> None:
        """Return when READY. Raises StartupError when it can never be."""
        ...

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None: ...
    def cancel(self, slot: int, generation: int) -> None: ...

    async def stop(self) -> None:
        """End the engine; ends its process within a few seconds whatever it does."""
        ...


class Host(Protocol):
    """An engine that several processes share, as the one sees it that starts and watches it, and submits nothing."""

    @property
    def state(self) -> ReplicaState: ...
    @property
    def pid(self) -> int | None:
        """Of the engine's process; None between two."""
        ...

    def listen(self, on_batch: OnBatch, on_state: OnState) -> None: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def lead(self, number: int, meter: Spec | None, hand: Hand, linger_s: float) -> None:
        """Give process `number`, whose counters page is `meter`, a way to the engine, which is READY.

        `hand` is called once, on the loop, now or later; never, if the engine dies first. linger_s: for how long an
        engine that can may outlive its host, for what the process waits for.
        """
        ...

    def gone(self, number: int) -> None:
        """That process has ended: nobody waits for what it had asked for."""
        ...


class Guest(Replica, Protocol):
    """The same engine, as each of the others sees it. It asks for a way to it at its start, and when one has ended."""

    def engine_is(self, state: ReplicaState, line: str) -> None:
        """What the host says. That it is ready is said by `attach`."""
        ...

    def attach(self, how: How, info: EngineInfo, fds: Sequence[int]) -> None:
        """The engine is ready, and this is the way to it; the descriptors are the guest's now."""
        ...


class Clock(Protocol):
    """What an in-loop engine needs of the loop (asyncio's own methods fit)."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> object: ...
    def call_soon(self, callback: Callable[[], None], /) -> object: ...
    def time(self) -> float: ...


class Fragments(Protocol):
    """Token id -> JSON-escaped UTF-8 text in a fixed-width field (issue: the hot path).

    text: structured or void array, shape (vocab,), dtype V{width}: the escaped text, a closing `"`, then spaces.
    fast: bool array, shape (vocab,): the token may be written from `text`; False sends it to the detokenizer.
    """

    width: int
    text: npt.NDArray[np.void]
    fast: npt.NDArray[np.bool_]


class Detokenizer(Protocol):
    """Text of one generation, incrementally: UTF-8 hold-back and stop strings."""

    #: The stop string that matched, or None. Once set, push and finish return "".
    stopped: str | None
    #: Bytes or a possible stop-string prefix are held back (the next token cannot take the fragment table).
    holding: bool

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is now certain. Never contains half a character or the start of a stop string."""
        ...

    def consumed(self) -> int:
        """Tokens pushed, up to and including the one that completed a stop string."""
        ...

    def finish(self) -> str:
        """What was held back, at the end; incomplete UTF-8 becomes U+FFFD once, as the tokenizer's own decode does."""
        ...


class Text(Protocol):
    """A tokenizer with its chat template. All methods are thread-safe; encode releases the GIL."""

    vocab_size: int
    eos_ids: frozenset[int]
    fragments: Fragments | None
    #: Prompts of more tokens may be refused (ContextOverflow) before they are tokenized to their end; 0: no limit.
    limit_tokens: int

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the tokenizer's own special tokens (BOS) if it adds any."""
        ...

    def chat_ids(self, messages: Sequence[object], template_args: dict[str, object]) -> list[int]:
        """Ids of the rendered chat template. Raises InvalidRequest when the template refuses the messages."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token (logprobs); special tokens give their name."""
        ...

    def detokenizer(
        self,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> Detokenizer: ...


def known(info: EngineInfo | None) -> EngineInfo:
    """What a replica says of itself, once there is something to say. Raises RuntimeError before."""
    if info is None:
        raise RuntimeError("the engine has not been ready yet")
    return info


def check_request(info: EngineInfo, eos_ids: frozenset[int], sampling: SamplingParams, prompt: Prompt) -> None:
    """Refuse what could hurt an engine: ids out of range, an empty prompt. Raises InvalidRequest."""
    if not prompt.ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    vocab, low, high = info.vocab_size, prompt.low, prompt.high
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise InvalidRequest(f"token id {echo(bad)} is out of the vocabulary (0..{vocab - 1})", param="prompt")
    for param, ids in (("logit_bias", sampling.logit_bias.keys()), ("stop_token_ids", sampling.stop_token_ids)):
        for i in ids:
            if not 0 <= i < vocab:
                raise InvalidRequest(f"token id {echo(i)} is out of the vocabulary (0..{vocab - 1})", param=param)
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("min_tokens is greater than max_tokens", param="min_tokens")
