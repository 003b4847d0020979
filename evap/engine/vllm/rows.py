"""The engine core's message of one step -> plain tokens and rows. No I/O.

`Outputs` is decoded by evap itself, straight from msgpack into the few fields that matter: for a step of 128 requests
that costs 0.2 us a request, and no object of vLLM's is made. Log probabilities come as tensors in vLLM's own encoding;
a step that has some is decoded once more by vLLM's decoder. `names.ORDER` holds the positions to the installed release.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import msgspec

from evap.engine.vllm.runs import Row
from evap.messages import Finish, TokenLogprobs, TopLogprob

#: Key in an output's trace_headers under which our scheduler sends its account of a request (see scheduler.py).
ACCOUNT_KEY: Final = "evap"

#: vLLM's FinishReason -> Finish. A detected repetition ends an answer like a stop; its last token is text.
FINISHES: Final = {0: Finish.STOP, 1: Finish.LENGTH, 2: Finish.CANCELLED, 3: Finish.ERROR, 4: Finish.STOP}
_STOP: Final = 0


class Output(msgspec.Struct, array_like=True, gc=False):
    """The head of vLLM's EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: dict[str, Any] | None = None


class Utility(msgspec.Struct, array_like=True, gc=False):
    call_id: int
    failure_message: str | None = None
    result: Any = None


class Outputs(msgspec.Struct, array_like=True, gc=False):
    """The head of vLLM's EngineCoreOutputs."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: Utility | None = None


class Account(msgspec.Struct, frozen=True):
    """What the engine itself counts for a finished request whose tokens went through the ring."""

    request_id: str
    count: int
    fingerprint: int


#: (ids of requests with one plain token, their tokens, everything else, accounts to settle)
Step = tuple[Sequence[str], Sequence[int], list[Row], list[Account]]


class Plain(msgspec.Struct, array_like=True, gc=False):
    """What a plain step needs of an EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None


class PlainOutputs(msgspec.Struct, array_like=True, gc=False):
    engine_index: int
    outputs: list[Plain]


_ids: Final = attrgetter("request_id")
_tokens: Final = attrgetter("new_token_ids")
_logprobs: Final = attrgetter("new_logprobs")
_prompts: Final = attrgetter("new_prompt_logprobs_tensors")
_PLAIN: Final = msgspec.msgpack.Decoder(PlainOutputs)


def plain_step(frame: bytes, rest: bytes) -> Step | None:
    """The step, if each of its outputs is one token and nothing else; None if any may be more.

    `rest`: what vLLM's encoder writes of a plain output after its tokens: the members that are not set, nils for the
    most part. Counting it says in 2 us whether all outputs end like that. Log probabilities, which come first after
    the tokens and end in nils themselves, are looked at; what comes behind them would leave too few nils.
    """
    outputs = _PLAIN.decode(frame).outputs
    if not outputs or frame.count(rest) != len(outputs) or any(map(_logprobs, outputs)) or any(map(_prompts, outputs)):
        return None
    tokens = list(chain.from_iterable(map(_tokens, outputs)))  # none has no token: it would have ended
    return (list(map(_ids, outputs)), tokens, [], []) if len(tokens) == len(outputs) else None


def rest_of_plain(encoded: bytes, without_rest: bytes) -> bytes:
    """`rest` for `plain_step`, from an encoded plain output, and from [request id, tokens] of the same. b"" when this
    release of vLLM encodes so that a rest would not be unmistakable: then every step is looked at one by one."""
    rest = encoded[encoded.index(without_rest[1:]) + len(without_rest) - 1 :]
    nils, zero, _ = rest.partition(b"\x00")
    return rest if zero and len(nils) > 8 and set(nils) == {0xC0} else b""


def needs_tensors(outputs: Sequence[Output]) -> bool:
    """Log probabilities are in it: decode it with vLLM's decoder and give the result to `step`."""
    return any(o.new_logprobs is not None or o.new_prompt_logprobs_tensors is not None for o in outputs)


def step(outputs: Sequence[Output], typed: Sequence[Any] | None = None) -> Step:
    """`typed`: the same outputs from vLLM's decoder, when `needs_tensors`."""
    ids: list[str] = []
    tokens: list[int] = []
    rows: list[Row] = []
    accounts: list[Account] = []
    for n, output in enumerate(outputs):
        if not _unusual(output):
            ids.append(output.request_id)
            tokens.append(output.new_token_ids[0])
            continue
        account = _account(output)
        if account is not None:
            accounts.append(account)
        else:
            rows.append(_row(output, typed[n] if typed is not None else None))
    return ids, tokens, rows, accounts


def _unusual(output: Output) -> bool:
    return (
        output.finish_reason is not None
        or len(output.new_token_ids) != 1
        or output.prefill_stats is not None
        or output.new_logprobs is not None
        or output.trace_headers is not None
        or output.new_prompt_logprobs_tensors is not None
    )


def _account(output: Output) -> Account | None:
    text = (output.trace_headers or {}).get(ACCOUNT_KEY)
    if text is None:
        return None
    count, fingerprint = text.split(":")
    return Account(output.request_id, int(count), int(fingerprint))


def _row(output: Output, typed: Any) -> Row:
    reason = output.finish_reason
    stats = output.prefill_stats
    prompt = typed.new_prompt_logprobs_tensors if typed is not None else None
    return Row(
        request_id=output.request_id,
        tokens=output.new_token_ids,
        finish=FINISHES.get(reason, Finish.ERROR) if reason is not None else Finish.NONE,
        silent=reason == _STOP,
        logprobs=positions(typed.new_logprobs) if typed is not None and typed.new_logprobs is not None else None,
        cached=int(stats.get("num_cached_tokens", 0)) if stats is not None else None,
        prompt_logprobs=[None, *positions(prompt)] if prompt is not None else None,
    )


def positions(found: Any) -> list[TokenLogprobs]:
    """vLLM's LogprobsLists (numpy) or LogprobsTensors (torch): per position, the token's own first, then the best k."""
    ids, values = found.logprob_token_ids.tolist(), found.logprobs.tolist()
    return [
        TokenLogprobs(logprob=value[0], top=tuple(TopLogprob(i, v) for i, v in zip(token[1:], value[1:], strict=True)))
        for token, value in zip(ids, values, strict=True)
    ]
