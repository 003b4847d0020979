"""The life of a request as a table. What it does with tokens is tested through dispatch."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from evap.app import send_error
from evap.choice import ChoiceRun
from evap.engine.synthetic import SyntheticText
from evap.errors import EngineFailed
from evap.exchange import Exchange, Input, State
from evap.messages import Finish, ParsedRequest, SamplingParams, TokenLogprobs, TopLogprob
from evap.protocol.api.router import dialects
from evap.states import TRANSITIONS
from tests.fakes import FakeCore, FakeReply, head


def exchange(**fields: Any) -> Exchange:
    fields = {"sampling": SamplingParams(), **fields}
    request = ParsedRequest(model=None, messages=[{"role": "user", "content": "x"}], **fields)
    renderer = dialects()["chat"].renderer(request, id_suffix="x" * 24, model="m", created_s=0)
    return Exchange(
        reply=FakeReply(FakeCore(), 1), head=head(), request=request, renderer=renderer, text=SyntheticText(),
        headers=(), send_error=send_error, stream_buffer=1024, opened_ns=0,
    )  # fmt: skip


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Input)))
def test_every_pair_is_a_transition_or_an_error(state: State, event: Input) -> None:
    it = exchange()
    it.state = state
    assert it.can(event) == ((state, event) in TRANSITIONS)
    if it.can(event):
        it.move(event)
        assert it.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            it.move(event)


def test_settled_is_the_end_and_is_reached_once() -> None:
    assert not [s for s, _ in TRANSITIONS if s is State.SETTLED]
    assert {s for (s, e) in TRANSITIONS if e is Input.SETTLE} == {State.ANSWERED, State.CANCELLED}


def test_seeds_differ_by_choice_and_stay_in_range() -> None:
    it = exchange(sampling=SamplingParams(seed=(1 << 63) - 1, max_tokens=5))
    it.prompt_ids = [1]
    seeds = [ChoiceRun(it, i).request().sampling.seed for i in range(3)]
    assert seeds == [(1 << 63) - 1, 0, 1]


def test_no_seed_stays_no_seed() -> None:
    it = exchange()
    assert ChoiceRun(it, 2).request().sampling.seed is None


def test_a_second_failure_changes_nothing() -> None:
    it = exchange()
    it.fail(EngineFailed("first"))
    body = it.reply.body  # type: ignore[attr-defined]
    it.fail(EngineFailed("second"))
    assert it.reply.body == body  # type: ignore[attr-defined]
    assert it.state is State.ANSWERED


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"stream": True}, True),
        ({"stream": False}, False),
        ({"stream": True, "stop": ("x",)}, False),
        ({"stream": True, "sampling": SamplingParams(logprobs=1)}, False),
        ({"stream": True, "skip_special_tokens": False}, False),
        ({"stream": True, "continuous_usage": True}, False),
    ],
)
def test_rows_are_for_requests_that_need_no_text_processing(fields: dict[str, Any], rows: bool) -> None:
    assert exchange(**fields).rows_allowed is rows


def scored(stream: bool) -> Exchange:
    body = b'{"prompt":"abc","echo":true,"logprobs":1,"n":1,"stream":%s}' % (b"true" if stream else b"false")
    dialect = dialects(structured_output=True)["completions"]
    request = dialect.parse(body, max_choices=1)
    renderer = dialect.renderer(request, id_suffix="x" * 24, model="m", created_s=0)
    it = Exchange(
        reply=FakeReply(FakeCore(), 1), head=head(), request=request, renderer=renderer, text=SyntheticText(),
        headers=(), send_error=send_error, stream_buffer=1 << 20, opened_ns=0,
    )  # fmt: skip
    it.prompt_ids = [97, 98, 99]
    it.choices = [ChoiceRun(it, 0)]
    it.move(Input.SUBMIT)
    return it


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_with_logprobs_waits_for_those_of_the_prompt(stream: bool) -> None:
    it = scored(stream)
    (choice,) = it.choices
    if stream:
        it.begin()
        assert b"abc" not in it.reply.body  # type: ignore[attr-defined]
    entries = [None, *(TokenLogprobs(logprob=-n, top=(TopLogprob(5, -0.5),)) for n in (1.0, 2.0))]
    it.take_prompt(choice, entries)
    it.take(choice, [100], [TokenLogprobs(logprob=-0.25)])
    choice.given = 1
    it.finish(choice, Finish.LENGTH, None)
    body = it.reply.body  # type: ignore[attr-defined]
    pieces = (
        [json.loads(e[6:]) for e in body.split(b"\n\n") if e.startswith(b"data: {")] if stream else [json.loads(body)]
    )
    found = [piece["choices"][0] for piece in pieces]
    assert "".join(c["text"] for c in found).startswith("abc")
    logprobs = [c["logprobs"] for c in found if c["logprobs"]]
    assert [v for p in logprobs for v in p["token_logprobs"]] == [None, -1.0, -2.0, -0.25]
    assert [v for p in logprobs for v in p["text_offset"]] == [0, 1, 2, 3]
    assert logprobs[0]["top_logprobs"][0] is None
