"""What crosses packages: the one vocabulary of protocol, exchange, engine and metering.

Units are in the names (`_ms`, `_ns`, `_s`, `_bytes`, `_tokens`). Nothing here does any I/O, and nothing
here knows HTTP or a GPU. Everything is either a frozen struct or a numpy array with a stated dtype.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]


class Finish(enum.IntEnum):
    """Why a generation ended; the low four bits of a record's flags."""

    NONE = 0  #: still running
    STOP = 1  #: end-of-sequence, a stop token id, or (set by the exchange) a stop string
    LENGTH = 2  #: max_tokens, the context, or the budget is used up
    CANCELLED = 3  #: the engine confirms a cancel
    ERROR = 4  #: the engine failed; the exchange answers with an error


FINISH_MASK: Final = 0x0F
#: The record carries no token (a bare final record, or a META record).
NO_TOKEN: Final = 0x10
#: `TokenBatch.logprobs` has an entry for this record.
HAS_LOGPROBS: Final = 0x20
#: The token counts but is not text (EOS or a stop token id).
SILENT: Final = 0x40
#: No token: `token` is the number of cached prompt tokens. At most once, before the first token.
META: Final = 0x80


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One alternative at a position; `logprob` is a natural logarithm."""

    token: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probability of a sampled token and of the `k` most likely ones, most likely first."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class TokenBatch:
    """The records of one engine step (or of several), in order. Arrays of equal length, never a Python object a token.

    slot: int32 index of the slot table. generation: int32, 0..65535, of the slot when the work was submitted.
    token: int32 id. index: int32 position in the generation, from 0. flags: uint8, see the constants above.
    step: the engine's step counter at the last record. logprobs: record number -> entry, for records with HAS_LOGPROBS.
    prompt_logprobs: number of a META record -> one entry per prompt token (None for the first, which nothing predicts).
    steady: the engine knows that no flag is set and no token is a generation's first, so that nobody needs to look.
    """

    __slots__ = ("flags", "generation", "index", "logprobs", "prompt_logprobs", "slot", "steady", "step", "token")

    def __init__(
        self,
        slot: Int32,
        generation: Int32,
        token: Int32,
        index: Int32,
        flags: UInt8,
        step: int = 0,
        logprobs: Mapping[int, TokenLogprobs] | None = None,
        prompt_logprobs: Mapping[int, Sequence[TokenLogprobs | None]] | None = None,
        *,
        steady: bool = False,
    ) -> None:
        self.slot = slot
        self.generation = generation
        self.token = token
        self.index = index
        self.flags = flags
        self.step = step
        self.logprobs: Mapping[int, TokenLogprobs] = logprobs if logprobs is not None else {}
        self.prompt_logprobs: Mapping[int, Sequence[TokenLogprobs | None]] = prompt_logprobs or {}
        self.steady = steady

    def __len__(self) -> int:
        return len(self.slot)

    def select(self, mask: npt.NDArray[np.bool_]) -> TokenBatch:
        """The records where `mask` holds."""
        logprobs, prompts = self.logprobs, self.prompt_logprobs
        if logprobs or prompts:
            numbers = {int(old): new for new, old in enumerate(np.flatnonzero(mask))}
            logprobs = {numbers[i]: entry for i, entry in logprobs.items() if i in numbers}
            prompts = {numbers[i]: entries for i, entries in prompts.items() if i in numbers}
        return TokenBatch(
            self.slot[mask], self.generation[mask], self.token[mask], self.index[mask], self.flags[mask], self.step,
            logprobs, prompts,
        )  # fmt: skip


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample, validated by the API and completed by the exchange; engines may rely on the ranges.

    temperature 0..2 (0 is greedy); top_p in (0, 1]; top_k >= 1 or 0 for off; min_p 0..1; penalties -2..2;
    repetition_penalty in (0, 10]; logit_bias id -> -100..100; logprobs None or 0..20 (number of alternatives).
    max_tokens >= 1 is always set when an engine sees it; seed None means the engine chooses.
    """

    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    #: Engine-specific extras that evap validated (structured output for vLLM, say); empty for most.
    extra: dict[str, Any] = {}


class Prompt(NamedTuple):
    """A tokenized prompt. ids: a list, or a memoryview of C ints where it is long. low, high: the least and the
    greatest of them (0 if there are none). text: to be echoed, where the request does not have it."""

    ids: Sequence[int]
    low: int
    high: int
    text: str | None = None

    @classmethod
    def of(cls, ids: Sequence[int]) -> Prompt:
        return cls(ids, *span(ids))


def span(ids: Sequence[int]) -> tuple[int, int]:
    """The least and the greatest id; zeros if there are none."""
    if not ids:
        return 0, 0
    if isinstance(ids, memoryview):
        array = np.frombuffer(ids, np.int32)
        return int(array.min()), int(array.max())
    return min(ids), max(ids)


def id_list(ids: Sequence[int]) -> list[int]:
    """For those who need a list."""
    return ids.tolist() if isinstance(ids, memoryview) else list(ids)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation: what an engine is given. n choices are n of these with seeds offset by the choice."""

    #: a list, or a memoryview of C ints (read-only) where it is long
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    #: Lower is sooner (vLLM's sense); of the key, RFC 9218's urgency, or the body: see `waiting.rank`.
    priority: int = 0
    #: Separates tenants' prefix caches; derived from the key by evap, never from the client.
    cache_salt: str = ""
    #: Adapter (LoRA) or model name to run with, when the engine serves several.
    adapter: str = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Exact token counts of one exchange, summed over its choices. Prompt counted once.

    computed: by the engine; emitted: after stop strings and EOS (the end token itself counts, as in vLLM);
    delivered: accepted by the transport within the flow-control window. delivered <= emitted <= computed.
    """

    prompt: int = 0
    cached: int = 0
    computed: int = 0
    emitted: int = 0
    delivered: int = 0


#: `LogprobText.logprob` of the first token of an echoed prompt: nothing predicts it.
UNPREDICTED: Final = float("inf")


class LogprobText(msgspec.Struct, frozen=True):
    """A token with its text, ready for an API: `data` are its exact bytes."""

    text: str
    logprob: float
    data: bytes
    top: tuple[tuple[str, float, bytes], ...] = ()


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated API request, whatever the dialect. Exactly one of messages, prompt_text, prompt_ids is set;
    none in one whose prompt is tokenized elsewhere (evap.intake)."""

    model: str | None
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt_text: str | None = None
    prompt_ids: Sequence[int] | None = None
    template_args: Mapping[str, Any] = {}
    #: the field of the body that the prompt was in, for errors
    prompt_field: str = "messages"
    sampling: SamplingParams
    #: fields of `sampling` that hold the API's default because the request leaves them open: a model's own go before
    left_open: tuple[str, ...] = ()
    #: None: as many as the context leaves.
    max_tokens: int | None = None
    n: int = 1
    #: The body's own (vLLM's): lower is sooner; None: what the header says.
    priority: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    user: str | None = None


class Choice(msgspec.Struct, kw_only=True):
    """One finished choice of a whole answer."""

    index: int
    text: str
    finish_reason: str  # "stop" | "length" | "error"
    stop_reason: str | int | None = None
    logprobs: list[LogprobText] | None = None


class ReplicaState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"  #: down, a restart is coming or has been given up
    STOPPED = "stopped"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a ready replica says of itself."""

    engine: str  # "torch" | "vllm" | "synthetic"
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    max_running: int
    #: KV capacity in tokens; 0 when the engine has none.
    kv_tokens: int = 0
    version: str = ""
    #: Fields of SamplingParams that the model's own configuration sets where a request does not.
    sampling_defaults: dict[str, Any] = {}
    #: max_tokens of a request that has none and whose dialect has no default; 0: what the context leaves.
    default_max_tokens: int = 0
