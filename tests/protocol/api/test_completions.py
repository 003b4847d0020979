"""The completions dialect: prompts of every form, and the shape of its answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from evap.errors import InvalidRequest
from evap.messages import Choice, LogprobText, ParsedRequest, Usage
from evap.protocol.api.completions import Completions

SUFFIX = "b" * 24
USAGE = Usage(prompt=3, emitted=2, computed=2)
HEAD = {"id": "cmpl-" + SUFFIX, "object": "text_completion", "created": 1_700_000_000, "model": "m"}


def parse(prompt: Any = "hi", **extra: Any) -> ParsedRequest:
    return Completions().parse(json.dumps({"prompt": prompt, **extra}).encode(), max_choices=8)


def refusal(prompt: Any = "hi", **extra: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(prompt, **extra)
    return caught.value


def renderer(prompt: Any = "hi", **extra: Any) -> Any:
    return Completions().renderer(parse(prompt, **extra), id_suffix=SUFFIX, model="m", created_s=1_700_000_000)


def event(data: bytes) -> Any:
    return json.loads(data.removeprefix(b"data: "))


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("", "", None),
        ("a\u00e9\U0001f600", "a\u00e9\U0001f600", None),
        (["x"], "x", None),
        ([1, 2, 3], None, [1, 2, 3]),
        ([[1, 2**31 - 1]], None, [1, 2**31 - 1]),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_prompts(prompt: Any, text: str | None, ids: list[int] | None, indent: int | None) -> None:
    request = Completions().parse(json.dumps({"prompt": prompt}, indent=indent).encode())
    assert (request.prompt_text, request.prompt_ids, request.messages) == (text, ids, None)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"), (5, "prompt"), ({"a": 1}, "prompt"), (True, "prompt"), ([], "prompt"), ([[]], "prompt[0]"),
        ([1.5], "prompt[0]"), ([1, "a"], "prompt[1]"), ([1, True], "prompt[1]"), ([-1], "prompt[0]"),
        ([2**31], "prompt[0]"), ([10**25], "prompt[0]"), ([[1, -1]], "prompt[0][1]"), ("\ud83d", "prompt"),
        (["\ude00"], "prompt[0]"), ([None], "prompt[0]"), ([True], "prompt[0]"),
    ],
)  # fmt: skip
def test_bad_prompts(prompt: Any, param: str) -> None:
    assert refusal(prompt).param == param


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], ["a", 1], [[1], "a"], ["x"] * 500_000, [[1]] * 500_000])
def test_several_prompts_are_refused_at_the_second(prompt: Any) -> None:
    error = refusal(prompt)
    assert error.param == "prompt"
    assert "one prompt per request" in error.message


def test_the_prompt_is_required() -> None:
    with pytest.raises(InvalidRequest, match="prompt is required"):
        Completions().parse(b"{}")


def test_ids_beyond_any_context_are_refused_undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evap.protocol.api.completions.MAX_PROMPT_IDS", 3)
    assert parse([1, 2, 3]).prompt_ids == [1, 2, 3]
    assert refusal([1, 2, 3, 4]).message == "prompt has more than 3 token ids"
    assert refusal([[1, 2, 3, 4]]).param == "prompt"


def test_other_fields() -> None:
    assert parse().max_tokens == 16
    assert parse(max_tokens=5).max_tokens == 5
    assert parse(logprobs=5).sampling.logprobs == 5
    assert parse(logprobs=0).sampling.logprobs == 0
    assert parse(echo=True).echo
    assert parse(best_of=2, n=2).n == 2
    assert parse(best_of=1) == parse(suffix=None)


@pytest.mark.parametrize(
    ("prompt", "extra", "param"),
    [
        ("a", {"logprobs": 6}, "logprobs"),
        ("a", {"logprobs": True}, "logprobs"),
        ("a", {"suffix": "x"}, "suffix"),
        ("a", {"best_of": 2}, "best_of"),
        ("a", {"best_of": 2, "n": 3}, "best_of"),
        ("a", {"echo": True, "logprobs": 1}, "echo"),
        ([1], {"echo": True}, "echo"),
        ("a", {"echo": 1}, "echo"),
    ],
)
def test_refused(prompt: Any, extra: dict[str, Any], param: str) -> None:
    assert refusal(prompt, **extra).param == param


def test_a_stream() -> None:
    r = renderer(stream=True)
    assert r.prelude(0) == b""
    assert event(r.delta(2, 'a"')) == {
        **HEAD, "choices": [{"index": 2, "text": 'a"', "logprobs": None, "finish_reason": None}],
    }  # fmt: skip
    assert event(r.finish(0, "stop", 5)) == {
        **HEAD, "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": 5}],
    }  # fmt: skip
    assert r.done() == b"data: [DONE]\n\n"


def test_logprobs_offsets_run_on_across_events_per_choice() -> None:
    first = [
        LogprobText(
            text="\u00e9a",
            logprob=-1.0,
            data=b"",
            top=(("\u00e9a", -1.0, b""), ("b", -math.inf, b""), ("c", -9.0, b"")),
        )
    ]
    second = [LogprobText(text="xyz", logprob=-2.0, data=b""), LogprobText(text="w", logprob=-3.0, data=b"")]
    r = renderer(stream=True, logprobs=2, n=2)
    assert event(r.delta(0, "\u00e9a", first))["choices"][0]["logprobs"] == {
        "text_offset": [0], "token_logprobs": [-1.0], "tokens": ["\u00e9a"],
        "top_logprobs": [{"\u00e9a": -1.0, "b": -9999.0}],
    }  # fmt: skip
    assert event(r.delta(1, "\u00e9a", first))["choices"][0]["logprobs"]["text_offset"] == [0]
    assert event(r.delta(0, "xyzw", second))["choices"][0]["logprobs"] == {
        "text_offset": [2, 5], "token_logprobs": [-2.0, -3.0], "tokens": ["xyz", "w"],
        "top_logprobs": [{"xyz": -2.0}, {"w": -3.0}],
    }  # fmt: skip


def test_a_whole_answer() -> None:
    r = renderer(logprobs=0)
    logprobs = [LogprobText(text="a", logprob=-1.0, data=b"a", top=(("b", -0.5, b"b"),))]
    choice = Choice(index=0, text="a", finish_reason="length", logprobs=logprobs)
    assert json.loads(r.whole([choice], USAGE)) == {
        **HEAD,
        "choices": [{"index": 0, "text": "a", "finish_reason": "length", "logprobs": {
            "text_offset": [0], "token_logprobs": [-1.0], "tokens": ["a"], "top_logprobs": [{"a": -1.0}]}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
                  "prompt_tokens_details": {"cached_tokens": 0}},
    }  # fmt: skip
