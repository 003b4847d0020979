"""The step's message, decoded by evap itself: what is plain, what is a row, and what both say."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.vllm.rows import Account, Outputs, needs_tensors, plain_step, positions, rest_of_plain, step
from evap.engine.vllm.runs import Row
from evap.messages import Finish, TokenLogprobs, TopLogprob


def output(request_id: str, tokens: list[int], **fields: Any) -> list[Any]:
    """As vLLM 0.32 sends it: an array of 18."""
    names = ("new_logprobs", "prompt", "pooling", "finish", "stop", "events", "kv", "ec", "trace", "stats")
    return [request_id, tokens, *(fields.get(name) for name in names), None, 0, None, None, None, None]


def decode(*outputs: list[Any]) -> Outputs:
    data = msgspec.msgpack.encode([0, list(outputs), None, 1.5, None, None, None, None, None])
    return msgspec.msgpack.decode(data, type=Outputs)


def frame(*outputs: list[Any]) -> bytes:
    return msgspec.msgpack.encode([0, list(outputs), None, 1.5, None, None, None, None, None])


PLAIN = msgspec.msgpack.encode(output("x", [1]))
REST = rest_of_plain(PLAIN, msgspec.msgpack.encode(["x", [1]]))


def test_a_plain_step_makes_no_rows() -> None:
    outputs = (output("a", [5]), output("b", [6]))
    assert plain_step(frame(*outputs), REST) == step(decode(*outputs).outputs) == (["a", "b"], [5, 6], [], [])


@pytest.mark.parametrize(
    "other",
    [
        output("b", []), output("b", [6, 7]), output("b", [6], finish=0), output("b", [6], stats={"x": 0}),
        output("b", [6], trace={"x": "1"}), output("b", [6], new_logprobs=["x"]), output("b", [6], prompt=["x"]),
        output("b", [6], new_logprobs=["x", None]), output("b", [6], prompt=["x", None, None]),
        output("b", [6], kv={"x": None}), output("b", [6], pooling=["x", None]),
    ],
)  # fmt: skip
def test_one_that_is_not_plain_is_noticed(other: list[Any]) -> None:
    assert plain_step(frame(output("a", [5]), other), REST) is None
    assert plain_step(frame(other), REST) is None


def test_a_message_without_outputs_is_not_plain() -> None:
    assert plain_step(frame(), REST) is None


@given(st.lists(st.integers(0, 2**31 - 1) | st.sampled_from([0xC0, 0xC0C0, 0x40C0C0C0]), min_size=1, max_size=20))
def test_no_token_looks_like_the_rest(tokens: list[int]) -> None:
    outputs = [output(f"r{n}", [token]) for n, token in enumerate(tokens)]
    found = plain_step(frame(*outputs), REST)
    assert found is not None
    assert found[1] == tokens
    assert plain_step(frame(*outputs, output("z", [1], finish=1)), REST) is None


def test_an_encoding_without_an_unmistakable_rest_is_not_trusted() -> None:
    head = msgspec.msgpack.encode(["x", [1]])
    for tail in ([None] * 16, [None] * 3 + [0], [0] + [None] * 15, []):
        assert rest_of_plain(msgspec.msgpack.encode(["x", [1], *tail]), head) == b""


@pytest.mark.parametrize(
    ("reason", "finish", "silent"),
    [
        (0, Finish.STOP, True), (1, Finish.LENGTH, False), (2, Finish.CANCELLED, False), (3, Finish.ERROR, False),
        (4, Finish.STOP, False), (9, Finish.ERROR, False),
    ],
)  # fmt: skip
def test_every_finish_reason(reason: int, finish: Finish, silent: bool) -> None:
    ids, tokens, rows, _ = step(decode(output("a", [5]), output("b", [6], finish=reason)).outputs)
    assert (ids, tokens) == (["a"], [5])
    assert rows == [Row(request_id="b", tokens=[6], finish=finish, silent=silent)]


def test_cached_tokens_come_with_the_first_output() -> None:
    _, _, rows, _ = step(decode(output("a", [5], stats={"num_prompt_tokens": 40, "num_cached_tokens": 32})).outputs)
    assert rows == [Row(request_id="a", tokens=[5], cached=32)]


def test_several_tokens_of_a_speculating_engine() -> None:
    _, _, rows, _ = step(decode(output("a", [5, 6, 7]), output("b", [])).outputs)
    assert rows == [Row(request_id="a", tokens=[5, 6, 7]), Row(request_id="b", tokens=[])]


def test_our_schedulers_account() -> None:
    found = step(decode(output("a", [], finish=1, trace={"evap": "12:99"}), output("b", [4])).outputs)
    assert found == (["b"], [4], [], [Account("a", 12, 99)])


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

    ids, tokens, rows, _ = step(message.outputs, [Typed(), None])
    assert (ids, tokens) == (["b"], [8])
    assert rows[0].logprobs == [TokenLogprobs(logprob=-0.5, top=(TopLogprob(3, -2.0),))]
    assert rows[0].prompt_logprobs == [None, TokenLogprobs(logprob=-3.0, top=(TopLogprob(2, -1.0),))]
