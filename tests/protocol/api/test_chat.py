"""The chat dialect: what becomes of messages and tools, and the shape of its answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from evap.errors import InvalidRequest
from evap.messages import Choice, LogprobText, ParsedRequest, Usage
from evap.protocol.api.chat import Chat

USER = {"role": "user", "content": "hi"}
SUFFIX = "a" * 24
USAGE = Usage(prompt=10, cached=4, computed=7, emitted=5, delivered=3)


def parse(messages: Any = (USER,), **extra: Any) -> ParsedRequest:
    return Chat().parse(json.dumps({"messages": messages, **extra}).encode(), max_choices=8)


def refusal(messages: Any = (USER,), **extra: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(messages, **extra)
    return caught.value


def renderer(**extra: Any) -> Any:
    return Chat().renderer(parse(**extra), id_suffix=SUFFIX, model='m"\u00e9', created_s=1_700_000_000)


def events(data: bytes) -> list[Any]:
    assert data.endswith(b"\n\n")
    return [json.loads(e.removeprefix(b"data: ")) for e in data[:-2].split(b"\n\n")]


# Messages


def test_messages_as_templates_know_them() -> None:
    request = parse([
        {"role": "developer", "content": "d"},
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "refusal": None, "audio": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}},
            {"function": {"name": "g", "arguments": ""}}]},
        {"role": "tool", "content": "t", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ])  # fmt: skip
    assert request.messages == [
        {"role": "system", "content": "d"},
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}},
            {"type": "function", "function": {"name": "g", "arguments": {}}}]},
        {"role": "tool", "content": "t", "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
    ]  # fmt: skip
    assert request.prompt_text is None
    assert request.prompt_ids is None


def call(arguments: Any) -> list[Any]:
    return [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([USER, "hi"], "messages[1]"),
        ([USER, {"content": "x"}], "messages[1].role"),
        ([USER, {"role": "function", "content": "x"}], "messages[1].role"),
        ([USER, {"role": "x" * 5000, "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": None, "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "assistant", "content": "\ud83d"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "\ude00"}], "messages[0].name"),
        (call({"x": 1}), "messages[0].tool_calls[0].function.arguments"),
        (call("[1]"), "messages[0].tool_calls[0].function.arguments"),
        (call("{"), "messages[0].tool_calls[0].function.arguments"),
        (call('"\\ud83d"'), "messages[0].tool_calls[0].function.arguments"),
        (call('{"a": "\\ud83d"}'), "messages[0].tool_calls[0].function.arguments.a"),
        (call(" " * (1 << 20) + "{}"), "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_bad_messages_are_named(messages: Any, param: str) -> None:
    error = refusal(messages)
    assert error.param == param
    assert len(error.message) < 300


def test_a_part_that_is_not_text_is_named() -> None:
    error = refusal([{"role": "user", "content": [{"type": "image_url"}]}])
    assert error.message == "messages[0].content[0] is of type 'image_url': this model takes text only"


def test_deep_arguments_are_refused() -> None:
    assert "deeper than 64" in refusal(call('{"a":' * 65 + "1" + "}" * 65)).message


def test_bad_arguments_say_which() -> None:
    assert "arguments must be an object" in refusal(call("[1]")).message
    assert (
        refusal(call("{")).message
        == "messages[0].tool_calls[0].function.arguments is not valid JSON: it ends too early"
    )


# Other fields of the dialect


def test_max_completion_tokens_wins() -> None:
    assert parse().max_tokens is None
    assert parse(max_tokens=5).max_tokens == 5
    assert parse(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert refusal(max_completion_tokens=0).param == "max_completion_tokens"


def test_logprobs() -> None:
    assert parse().sampling.logprobs is None
    assert parse(logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert parse(logprobs=True).sampling.logprobs == 0
    assert parse(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    for extra, param in (
        ({"logprobs": 5}, "logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ):  # fmt: skip
        assert refusal(**extra).param == param


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_tools_go_to_the_template() -> None:
    assert parse(tools=[TOOL], tool_choice="auto").template_args == {"tools": [TOOL]}
    assert parse(tools=[TOOL], tool_choice="none").template_args == {}
    assert parse(tools=[]).template_args == {}
    assert parse(chat_template_kwargs={"enable_thinking": False}, tools=[TOOL]).template_args == {
        "enable_thinking": False, "tools": [TOOL],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "x"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{**TOOL, "x": "x" * (1 << 20)}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": {str(i): i for i in range(100_000)}}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": [], "chat_template": ""}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "x" * (64 << 10)}}, "chat_template_kwargs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
    ],
)
def test_refused(extra: dict[str, Any], param: str) -> None:
    assert refusal(**extra).param == param


def test_defaults_may_be_spelled_out() -> None:
    extra = {"modalities": ["text"], "add_generation_prompt": True, "continue_final_message": False, "echo": False}
    assert parse(**extra, tool_choice="auto") == parse()


# Answers


def test_a_stream() -> None:
    r = renderer(n=2, stream=True)
    head = {
        "id": "chatcmpl-" + SUFFIX,
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": 'm"\u00e9',
    }
    role = {"role": "assistant", "content": ""}
    assert r.id == head["id"]
    assert events(r.prelude(0) + r.prelude(1)) == [
        {**head, "choices": [{"index": i, "delta": role, "finish_reason": None}]} for i in range(2)
    ]
    assert events(r.delta(1, 'a"\n')) == [
        {**head, "choices": [{"index": 1, "delta": {"content": 'a"\n'}, "finish_reason": None}]}
    ]
    assert events(r.finish(0, "length")) == [
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    ]
    assert r.done() == b"data: [DONE]\n\n"
    assert r.stream_type == b"text/event-stream; charset=utf-8"


@pytest.mark.parametrize("reason", ["\n\ndata: x", 7])
def test_stop_reason_as_vllm_has_it(reason: str | int) -> None:
    (event,) = events(renderer(stream=True).finish(0, "stop", reason))
    assert event["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": reason}


def test_usage_is_null_in_every_chunk_if_and_only_if_it_was_asked_for() -> None:
    without = renderer(stream=True)
    asked = renderer(stream=True, stream_options={"include_usage": True})
    for make in (
        lambda r: r.prelude(0),
        lambda r: r.delta(0, "x"),
        lambda r: r.finish(0, "stop"),
        lambda r: b'x"'.join(r.row(0)),
    ):
        (no,), (yes,) = (events(make(r)) for r in (without, asked))
        assert "usage" not in no
        assert yes["usage"] is None


def test_the_final_usage_event_has_no_choices() -> None:
    (event,) = events(renderer(stream=True, stream_options={"include_usage": True}).usage(USAGE))
    assert event["choices"] == []
    assert event["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip


def test_running_usage() -> None:
    r = renderer(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    for data in (r.prelude(0, USAGE), r.delta(0, "x", None, USAGE), r.finish(0, "stop", usage=USAGE)):
        assert events(data)[0]["usage"]["completion_tokens"] == 5


LOGPROBS = [
    LogprobText(
        text="\u00e9", logprob=-0.5, data=b"\xc3\xa9", top=(("\u00e9", -0.5, b"\xc3\xa9"), ("x", -math.inf, b"x"))
    ),
    LogprobText(text="\ufffd", logprob=math.nan, data=b"\xf0", top=()),
]


def expected_logprobs(k: int) -> dict[str, Any]:
    top = [
        {"token": "\u00e9", "logprob": -0.5, "bytes": [195, 169]},
        {"token": "x", "logprob": -9999.0, "bytes": [120]},
    ]
    return {"refusal": None, "content": [
        {"token": "\u00e9", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": top[:k]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [240], "top_logprobs": []},
    ]}  # fmt: skip


@pytest.mark.parametrize("k", [0, 1, 2])
def test_logprobs_in_both_forms(k: int) -> None:
    r = renderer(stream=True, logprobs=True, top_logprobs=k)
    (event,) = events(r.delta(0, "\u00e9", LOGPROBS))
    assert event["choices"][0] == {
        "index": 0, "delta": {"content": "\u00e9"}, "logprobs": expected_logprobs(k), "finish_reason": None,
    }  # fmt: skip
    whole = json.loads(r.whole([Choice(index=0, text="\u00e9", finish_reason="stop", logprobs=LOGPROBS)], USAGE))
    assert whole["choices"][0]["logprobs"] == expected_logprobs(k)


def test_a_whole_answer() -> None:
    r = renderer(n=2)
    choices = [
        Choice(index=0, text="a\u2028", finish_reason="stop"),
        Choice(index=1, text="", finish_reason="stop", stop_reason="X"),
    ]
    assert json.loads(r.whole(choices, USAGE)) == {
        "id": "chatcmpl-" + SUFFIX, "object": "chat.completion", "created": 1_700_000_000, "model": 'm"\u00e9',
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "a\u2028", "refusal": None}, "logprobs": None,
             "finish_reason": "stop"},
            {"index": 1, "message": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None,
             "finish_reason": "stop", "stop_reason": "X"},
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15,
                  "prompt_tokens_details": {"cached_tokens": 4}},
    }  # fmt: skip
    assert r.whole_type == b"application/json"
