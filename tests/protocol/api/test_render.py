"""Rows: whatever the text, the event is valid, and its constant parts are as wide as the other requests'."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.errors import EngineFailed, InvalidRequest, NotAcceptable
from evap.messages import Choice, LogprobText, ParsedRequest, SamplingParams, Usage
from evap.protocol.api.chat import Chat
from evap.protocol.api.completions import Completions
from evap.protocol.api.dialect import Dialect, Renderer
from evap.protocol.api.plain import PlainRenderer
from evap.protocol.api.tokens import TokensRenderer

DIALECTS: dict[str, Dialect] = {"chat": Chat(), "completions": Completions()}
SUFFIXES = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_", min_size=24, max_size=24)


def request(**changes: Any) -> ParsedRequest:
    return msgspec.structs.replace(ParsedRequest(model=None, sampling=SamplingParams(), stream=True), **changes)


def make(
    dialect: str,
    r: ParsedRequest,
    *,
    model: str = "m",
    suffix: str = "x" * 24,
    created: int = 1_700_000_000,
    kind: str = "sse",
) -> Renderer:
    return DIALECTS[dialect].renderer(r, id_suffix=suffix, model=model, created_s=created, kind=kind)


def text_of(dialect: str, choice: dict[str, Any]) -> Any:
    return choice["delta"]["content"] if dialect == "chat" else choice["text"]


@pytest.mark.parametrize("dialect", DIALECTS)
@given(text=st.text(), model=st.text(), index=st.integers(0, 1023), filler=st.integers(0, 30), usage=st.booleans())
def test_any_text_in_a_row_is_one_valid_event(
    *, dialect: str, text: str, model: str, index: int, filler: int, usage: bool
) -> None:
    renderer = make(dialect, request(include_usage=usage), model=model)
    row = renderer.row(index)
    assert row is not None
    event = row[0] + msgspec.json.encode(text)[1:] + b" " * filler + row[1]
    assert event.startswith(b"data: ")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    data = json.loads(event[6:])
    assert text_of(dialect, data["choices"][0]) == text
    assert data["choices"][0]["index"] == index
    assert data["model"] == model
    # the slow path's event says the same
    assert json.loads(renderer.delta(index, text)[6:]) == data


@pytest.mark.parametrize("dialect", DIALECTS)
@given(
    a=SUFFIXES,
    b=SUFFIXES,
    i=st.integers(0, 1023),
    j=st.integers(0, 1023),
    created=st.integers(1_000_000_000, 9_999_999_999),
)
def test_the_constant_parts_have_one_width_per_model(
    *, dialect: str, a: str, b: str, i: int, j: int, created: int
) -> None:
    first = make(dialect, request(), suffix=a).row(i)
    second = make(dialect, request(), suffix=b, created=created).row(j)
    assert first is not None
    assert second is not None
    assert [len(p) for p in first] == [len(p) for p in second]


def test_a_row_is_short() -> None:
    """Bytes on the wire per token; a change that adds some should be on purpose."""
    row = make("chat", request(), model="smollm2-135m").row(0)
    assert row is not None
    assert len(row[0]) + len(row[1]) == 197


@pytest.mark.parametrize("dialect", DIALECTS)
def test_streams_that_need_more_than_text_take_no_rows(dialect: str) -> None:
    assert make(dialect, request(sampling=SamplingParams(logprobs=0))).row(0) is None
    assert make(dialect, request(include_usage=True, continuous_usage=True)).row(0) is None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_error_is_an_event(dialect: str) -> None:
    event = make(dialect, request()).error(EngineFailed('it "died"\n'))
    assert event.count(b"\n") == 2
    assert json.loads(event[6:]) == {
        "error": {"message": 'it "died"\n', "type": "server_error", "param": None, "code": "engine_failed"}
    }


def test_logprob_offsets_start_after_the_echoed_prompt() -> None:
    renderer = make("completions", request(echo=True, prompt_text="12345", sampling=SamplingParams(logprobs=0)))
    event = json.loads(renderer.delta(0, "a", [LogprobText(text="a", logprob=-1.0, data=b"a")])[6:])
    assert event["choices"][0]["logprobs"]["text_offset"] == [5]


# Kinds


@pytest.mark.parametrize("dialect", DIALECTS)
def test_kinds(dialect: str) -> None:
    assert make(dialect, request()).kind == "sse"
    plain, tokens = make(dialect, request(), kind="text"), make(dialect, request(), kind="tokens")
    assert isinstance(plain, PlainRenderer)
    assert isinstance(tokens, TokensRenderer)
    assert plain.id == tokens.id == make(dialect, request()).id


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_what_a_bare_kind_cannot_carry_is_refused(kind: str) -> None:
    for changes, param in (({"n": 2}, "n"), ({"sampling": SamplingParams(logprobs=0)}, "logprobs")):
        with pytest.raises(InvalidRequest) as caught:
            make("chat", request(**changes), kind=kind)
        assert caught.value.param == param


def test_what_ids_cannot_do_is_refused() -> None:
    for changes, param in (({"stop": ("x",)}, "stop"), ({"echo": True, "prompt_text": "x"}, "echo")):
        with pytest.raises(InvalidRequest) as caught:
            make("completions", request(**changes), kind="tokens")
        assert caught.value.param == param
    with pytest.raises(NotAcceptable, match="stream: true"):
        make("chat", request(stream=False), kind="tokens")


@pytest.mark.parametrize("kind", ["sse", "text", "tokens"])
def test_every_renderer_takes_every_call(kind: str) -> None:
    renderer, usage = make("chat", request(), kind=kind), Usage(prompt=1, emitted=1)
    parts = [
        renderer.prelude(0), renderer.delta(0, "x", None, usage), renderer.finish(0, "stop", "s", usage),
        renderer.usage(usage), renderer.error(EngineFailed("x")), renderer.done(), renderer.tokens([1]),
        renderer.whole([Choice(index=0, text="x", finish_reason="stop")], usage),
    ]  # fmt: skip
    assert all(isinstance(p, bytes) for p in parts)
    assert isinstance(renderer.stream_type, bytes)
    assert isinstance(renderer.whole_type, bytes)
