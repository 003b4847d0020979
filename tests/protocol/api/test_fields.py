"""Sampling fields: ranges, strictness, limits. Everything here holds for both dialects."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.errors import InvalidRequest
from evap.messages import ParsedRequest, SamplingParams
from evap.protocol.api import fields
from evap.protocol.api.chat import Chat, ChatBody
from evap.protocol.api.completions import CompletionBody, Completions
from evap.protocol.api.dialect import Dialect

DIALECTS: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "chat": (Chat(), {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": (Completions(), {"prompt": "hi"}),
}


@pytest.fixture(params=sorted(DIALECTS))
def parse(request: pytest.FixtureRequest) -> Any:
    dialect, base = DIALECTS[request.param]

    def parse(max_choices: int = 128, **extra: Any) -> ParsedRequest:
        return dialect.parse(json.dumps({**base, **extra}).encode(), max_choices=max_choices)

    return parse


def refusal(parse: Any, **extra: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**extra)
    return caught.value


def test_everything_reaches_its_place(parse: Any) -> None:
    request: ParsedRequest = parse(
        model="m", max_tokens=7, min_tokens=2, temperature=0, top_p=0.5, top_k=40, min_p=0.1, seed=-5, n=3, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}, presence_penalty=-2,
        frequency_penalty=2, repetition_penalty=1.5, ignore_eos=True, skip_special_tokens=False,
        include_stop_str_in_output=True, user="u", stop=["a", "b"], stop_token_ids=[1, 2],
        logit_bias={"5": -100, "6": 1.5},
    )  # fmt: skip
    assert request.sampling == SamplingParams(
        temperature=0.0, top_p=0.5, top_k=40, min_p=0.1, seed=-5, presence_penalty=-2.0, frequency_penalty=2.0,
        repetition_penalty=1.5, logit_bias={5: -100.0, 6: 1.5}, stop_token_ids=(1, 2), ignore_eos=True, min_tokens=2,
    )  # fmt: skip
    assert (request.model, request.max_tokens, request.n, request.user) == ("m", 7, 3, "u")
    assert (request.stop, request.include_stop, request.skip_special_tokens) == (("a", "b"), True, False)
    assert (request.stream, request.include_usage, request.continuous_usage) == (True, True, True)


def test_null_is_absent(parse: Any) -> None:
    names = {f.encode_name for body in (ChatBody, CompletionBody) for f in msgspec.structs.fields(body)}
    assert parse(**dict.fromkeys(names - {"messages", "prompt"})) == parse()


@pytest.mark.parametrize("field", fields.IGNORED)
def test_ignored_fields_change_nothing(parse: Any, field: str) -> None:
    assert parse(**{field: {"a": [1]}}) == parse()


def test_unknown_fields_are_ignored(parse: Any) -> None:
    assert parse(made_up_yesterday={"x": 1}) == parse()


INTEGERS = ["max_tokens", "min_tokens", "top_k", "seed", "n"]
NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
BOOLEANS = ["stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"]


@pytest.mark.parametrize("value", [1.0, 1.5, True, "5", [1], {}, ""])
@pytest.mark.parametrize("field", INTEGERS)
def test_integers_are_strict(parse: Any, field: str, value: Any) -> None:
    error = refusal(parse, **{field: value})
    assert error.param == field
    assert "must be an integer" in error.message


@pytest.mark.parametrize("value", [True, "1", [1.0], {}])
@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_are_strict(parse: Any, field: str, value: Any) -> None:
    error = refusal(parse, **{field: value})
    assert error.param == field
    assert "must be a number" in error.message


@pytest.mark.parametrize("value", [1, 0, "true", []])
@pytest.mark.parametrize("field", BOOLEANS)
def test_booleans_are_strict(parse: Any, field: str, value: Any) -> None:
    error = refusal(parse, **{field: value})
    assert error.param == field
    assert "must be a boolean" in error.message


@pytest.mark.parametrize(
    ("field", "low", "high", "below", "above"),
    [
        ("max_tokens", 1, 2**31 - 1, 0, 2**31),
        ("min_tokens", 0, 2**31 - 1, -1, 2**31),
        ("temperature", 0, 2, -0.001, 2.001),
        ("top_p", 0.001, 1, 0, 1.001),
        ("top_k", -1, 2**31 - 1, -2, 2**31),
        ("min_p", 0, 1, -0.001, 1.001),
        ("seed", -(2**63), 2**63 - 1, -(2**63) - 1, 2**63),
        ("n", 1, 128, 0, 129),
        ("presence_penalty", -2, 2, -2.001, 2.001),
        ("frequency_penalty", -2, 2, -2.001, 2.001),
        ("repetition_penalty", 0.001, 10, 0, 10.001),
    ],
)
def test_ranges(*, parse: Any, field: str, low: float, high: float, below: float, above: float) -> None:
    parse(**{field: low})
    parse(**{field: high})
    for value in (below, above, -(10**25), 10**25):
        error = refusal(parse, **{field: value})
        assert error.param == field
        assert "out of range: it must be" in error.message


def test_n_is_capped_by_the_server(parse: Any) -> None:
    assert parse(n=2, max_choices=2).n == 2
    assert "at most 2" in refusal(parse, n=3, max_choices=2).message


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_off(parse: Any, value: int) -> None:
    assert parse(top_k=value).sampling.top_k == 0


def test_stream_options(parse: Any) -> None:
    assert refusal(parse, stream_options={"include_usage": True}).param == "stream_options"
    alone = parse(stream=True, stream_options={"continuous_usage_stats": True})
    assert (alone.include_usage, alone.continuous_usage) == (False, False)
    assert refusal(parse, stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


# Stop strings


def test_stop(parse: Any) -> None:
    longest = "\U0001f600" * fields.MAX_STOP_CHARS  # 12 bytes a character in JSON
    assert parse(stop="x").stop == ("x",)
    assert parse(stop=[]).stop == ()
    assert parse(stop=[longest] * 4).stop == (longest,) * 4
    for value, param in (
        ("", "stop"), ([""], "stop[0]"), (["a", 5], "stop[1]"), ([["a"]], "stop[0]"), (5, "stop"),
        (["a"] * 5, "stop"), ("x" * 257, "stop"), (["x" * 257], "stop[0]"), ({"a": 1}, "stop"),
        ("\ud83d", "stop"), (["a", "\ude00"], "stop[1]"),
    ):  # fmt: skip
        assert refusal(parse, stop=value).param == param, value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x"] * 500_000),
        ("stop", "x" * 500_000),
        ("stop_token_ids", [1] * 500_000),
        ("logit_bias", {str(i): 1 for i in range(50_000)}),
        ("response_format", {"type": "text", "x": ["x"] * 500_000}),
    ],
)
def test_oversized_lists_are_refused_undecoded(parse: Any, field: str, value: Any) -> None:
    error = refusal(parse, **{field: value})
    assert error.param == field
    assert "too large" in error.message


# Token ids


def test_stop_token_ids(parse: Any) -> None:
    assert parse(stop_token_ids=[2**31 - 1] * 128).sampling.stop_token_ids == (2**31 - 1,) * 128
    for value in ([-1], [2**31], [1.0], [True], ["1"], [10**25]):
        assert refusal(parse, stop_token_ids=value).param == "stop_token_ids[0]"
    assert "at most 128 entries" in refusal(parse, stop_token_ids=[1] * 129).message
    assert refusal(parse, stop_token_ids=1).param == "stop_token_ids"


def test_logit_bias(parse: Any) -> None:
    assert parse(logit_bias={}).sampling.logit_bias == {}
    full = {str(2**31 - 1 - i): -12.345678901234567 for i in range(1024)}
    assert len(parse(logit_bias=full).sampling.logit_bias) == 1024
    assert "at most 1024 entries" in refusal(parse, logit_bias={str(i): 1 for i in range(1025)}).message
    for value in (
        {"-1": 1}, {str(2**31): 1}, {"x": 1}, {"1.0": 1}, {" 1": 1}, {"01": 1}, {"": 1}, {"1": 101}, {"1": -100.5},
        {"1": "1"}, {"1": True}, {"1": None}, [1],
    ):  # fmt: skip
        error = refusal(parse, logit_bias=value)
        assert error.param == "logit_bias", value


# Structured output and what is refused


def test_response_format(parse: Any) -> None:
    assert parse(response_format={"type": "text"}).sampling.extra == {}
    for value in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, {"type": "x" * 1000}):
        error = refusal(parse, response_format=value)
        assert (error.param, error.code) == ("response_format", "unsupported_parameter")
        assert "not supported by this engine" in error.message
    assert refusal(parse, response_format={}).param == "response_format.type"
    assert refusal(parse, response_format="text").param == "response_format"


@pytest.mark.parametrize("dialect", [Chat(structured_output=True), Completions(structured_output=True)])
def test_response_format_for_an_engine_that_takes_it(dialect: Chat | Completions) -> None:
    base = DIALECTS["chat" if isinstance(dialect, Chat) else "completions"][1]
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    request = dialect.parse(json.dumps({**base, "response_format": wanted}).encode())
    assert request.sampling.extra == {"response_format": wanted}
    with pytest.raises(InvalidRequest):
        dialect.parse(json.dumps({**base, "response_format": {"type": "regex"}}).encode())


@pytest.mark.parametrize(
    "field",
    [
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids",
        "bad_words", "logits_processors", "prompt_logprobs", "truncate_prompt_tokens", "prompt_embeds",
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused(parse: Any, field: str) -> None:
    for value in (1, "x", ["x"], {"a": 1}):
        error = refusal(parse, **{field: value})
        assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize("dialect", [Chat(structured_output=True), Completions(structured_output=True)])
def test_what_vllm_has_is_taken_for_it(dialect: Chat | Completions) -> None:
    base = {"messages": [{"role": "user", "content": "x"}]} if isinstance(dialect, Chat) else {"prompt": "x"}
    given = {
        "structured_outputs": {"regex": "a"}, "guided_json": {"type": "object"}, "guided_regex": "a+",
        "guided_choice": ["a", "b"], "guided_grammar": "root ::= x", "allowed_token_ids": [1, 2], "bad_words": ["x"],
        "repetition_detection": {"min_count": 2},
    }  # fmt: skip
    assert dialect.parse(json.dumps({**base, **given}).encode()).sampling.extra == given
    for name, value in (("allowed_token_ids", [-1]), ("bad_words", ["x"] * 65), ("guided_choice", "x" * 300_000)):
        with pytest.raises(InvalidRequest) as caught:
            dialect.parse(json.dumps({**base, name: value}).encode())
        assert (caught.value.param or "").startswith(name)


def test_an_echo_is_scored_by_an_engine_that_can() -> None:
    body = json.dumps({"prompt": "x", "echo": True, "logprobs": 2}).encode()
    assert Completions(structured_output=True).parse(body).sampling.extra == {"prompt_logprobs": 2}
    with pytest.raises(InvalidRequest, match="echo with logprobs"):
        Completions().parse(body)


def test_beam_search(parse: Any) -> None:
    assert parse(use_beam_search=False) == parse()
    assert refusal(parse, use_beam_search=True).param == "use_beam_search"


def test_user_is_bounded(parse: Any) -> None:
    assert parse(user="u" * 512).user == "u" * 512
    assert "at most 512 characters" in refusal(parse, user="u" * 513).message


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
VALUES = SCALARS | st.lists(SCALARS, max_size=6) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=5)
NAMES = [f.encode_name for f in msgspec.structs.fields(fields.CommonFields)]


def holds(request: ParsedRequest) -> None:
    s = request.sampling
    assert 0 <= s.temperature <= 2
    assert 0 < s.top_p <= 1
    assert s.top_k >= 0
    assert 0 <= s.min_p <= 1
    assert 0 < s.repetition_penalty <= 10
    assert all(-2 <= p <= 2 for p in (s.presence_penalty, s.frequency_penalty))
    assert all(0 <= i < 2**31 and -100 <= b <= 100 for i, b in s.logit_bias.items())
    struct.pack("<q", s.seed or 0)
    assert 1 <= request.n <= 128
    assert len(request.stop) <= 4
    assert all(1 <= len(t) <= 256 for t in request.stop)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_whatever_is_accepted_holds_what_engines_rely_on(extra: dict[str, Any]) -> None:
    for dialect, base in DIALECTS.values():
        refused: InvalidRequest | None = None
        try:
            holds(dialect.parse(json.dumps({**base, **extra}).encode(), max_choices=128))
        except InvalidRequest as error:
            refused = error
        if refused is not None:
            assert (refused.param or "").split("[")[0].split(".")[0] in extra


def test_what_is_left_open_is_told_from_what_is_given_as_the_default(parse: Any) -> None:
    every = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert set(parse().left_open) == every
    given: ParsedRequest = parse(temperature=1, top_k=-1, repetition_penalty=None)
    assert set(given.left_open) == every - {"temperature", "top_k"}
    assert given.sampling == SamplingParams()
