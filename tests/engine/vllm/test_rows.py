"""Outputs that are more than a plain token, decoded by evap itself: rows and accounts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from evap.engine.vllm.rows import Account, Outputs, needs_tensors, positions, rows_of
from evap.engine.vllm.runs import Row
from evap.messages import Finish, TokenLogprobs, TopLogprob


def output(request_id: str, tokens: list[int], **fields: Any) -> list[Any]:
    """As vLLM 0.32 sends it: an array of 18."""
    names = ("new_logprobs", "prompt", "pooling", "finish", "stop", "events", "kv", "ec", "trace", "stats")
    return [request_id, tokens, *(fields.get(name) for name in names), None, 0, None, None, None, None]


def decode(*outputs: list[Any]) -> Outputs:
    data = msgspec.msgpack.encode([0, list(outputs), None, 1.5, None, None, None, None, None])
    return msgspec.msgpack.decode(data, type=Outputs)


@pytest.mark.parametrize(
    ("reason", "finish", "silent"),
    [
        (0, Finish.STOP, True), (1, Finish.LENGTH, False), (2, Finish.CANCELLED, False), (3, Finish.ERROR, False),
        (4, Finish.STOP, False), (9, Finish.ERROR, False),
    ],
)  # fmt: skip
def test_every_finish_reason(reason: int, finish: Finish, silent: bool) -> None:
    rows, accounts = rows_of(decode(output("a", [5]), output("b", [6], finish=reason)).outputs)
    assert rows == [Row(request_id="a", tokens=[5]), Row(request_id="b", tokens=[6], finish=finish, silent=silent)]
    assert not accounts


def test_cached_tokens_come_with_the_first_output() -> None:
    rows, _ = rows_of(decode(output("a", [5], stats={"num_prompt_tokens": 40, "num_cached_tokens": 32})).outputs)
    assert rows == [Row(request_id="a", tokens=[5], cached=32)]


def test_several_tokens_of_a_speculating_engine() -> None:
    rows, _ = rows_of(decode(output("a", [5, 6, 7]), output("b", [])).outputs)
    assert rows == [Row(request_id="a", tokens=[5, 6, 7]), Row(request_id="b", tokens=[])]


def test_our_schedulers_account() -> None:
    found = rows_of(decode(output("a", [], finish=1, trace={"evap": "12:99"}), output("b", [4])).outputs)
    assert found == ([Row(request_id="b", tokens=[4])], [Account("a", 12, 99)])


class Lists:
    def __init__(self, ids: list[list[int]], values: list[list[float]]) -> None:
        self.logprob_token_ids, self.logprobs = np.array(ids), np.array(values, np.float32)


def test_log_probabilities_are_the_tokens_own_and_then_the_best() -> None:
    found = positions(Lists([[7, 7, 3], [2, 9, 7]], [[-0.5, -0.5, -1.5], [-4, -0.25, -1]]))
    assert found == [
        TokenLogprobs(logprob=-0.5, top=(TopLogprob(7, -0.5), TopLogprob(3, -1.5))),
        TokenLogprobs(logprob=-4.0, top=(TopLogprob(9, -0.25), TopLogprob(7, -1.0))),
    ]
    assert positions(Lists([[7]], [[-0.5]])) == [TokenLogprobs(logprob=-0.5)]


def test_a_step_with_tensors_takes_them_from_vllms_decoder() -> None:
    message = decode(output("a", [7], new_logprobs=["<i8"]), output("b", [8]))
    assert needs_tensors(message.outputs)

    class Typed:
        new_logprobs: Any = Lists([[7, 3]], [[-0.5, -2]])
        new_prompt_logprobs_tensors: Any = Lists([[1, 2]], [[-3, -1]])

    rows, _ = rows_of(message.outputs, [Typed(), None])
    assert rows[1] == Row(request_id="b", tokens=[8])
    assert rows[0].logprobs == [TokenLogprobs(logprob=-0.5, top=(TopLogprob(3, -2.0),))]
    assert rows[0].prompt_logprobs == [None, TokenLogprobs(logprob=-3.0, top=(TopLogprob(2, -1.0),))]
