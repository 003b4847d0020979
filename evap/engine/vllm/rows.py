"""Outputs of the engine core that are more than one plain token (those are `plain.py`'s) -> rows. No I/O.

`Outputs` is decoded by evap itself, straight from msgpack into the few fields that matter, and no object of vLLM's is
made. Log probabilities come as tensors in vLLM's own encoding; outputs that have some are decoded once more by vLLM's
decoder. `names.ORDER` holds the positions to the installed release.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from evap.engine.vllm.runs import Row
from evap.messages import Finish, Int32, TokenLogprobs, TopLogprob

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


_NONE: Final = np.empty(0, np.int32)


class Step(NamedTuple):
    """One engine step. slots, generations, tokens: of requests with exactly one plain token each (int32, one length);
    rows: all others; accounts: to settle."""

    slots: Int32 = _NONE
    generations: Int32 = _NONE
    tokens: Int32 = _NONE
    rows: Sequence[Row] = ()
    accounts: Sequence[Account] = ()


def needs_tensors(outputs: Sequence[Output]) -> bool:
    """Log probabilities are in it: decode it with vLLM's decoder and give the result to `step`."""
    return any(o.new_logprobs is not None or o.new_prompt_logprobs_tensors is not None for o in outputs)


def rows_of(outputs: Sequence[Output], typed: Sequence[Any] | None = None) -> tuple[list[Row], list[Account]]:
    """`typed`: the same outputs from vLLM's decoder, when `needs_tensors`."""
    rows: list[Row] = []
    accounts: list[Account] = []
    for n, output in enumerate(outputs):
        account = _account(output) if output.trace_headers is not None else None
        if account is not None:
            accounts.append(account)
        else:
            rows.append(_row(output, typed[n] if typed is not None else None))
    return rows, accounts


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
