from __future__ import annotations

import datetime
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evap.engine import chat_template
from evap.engine.chat_template import ChatTemplate, load_chat_template, read_json, special_token_names
from evap.errors import InvalidRequest, StartupError
from tests.engine import small_tokenizers as small

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b>1 & 2</b>?"},
    {"role": "assistant", "content": "3 "},
    {"role": "user", "content": "sure?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

#: What templates of real models do: white space control, loops with break, macros, namespaces, filters, tests.
TEMPLATES = {
    "chatml": small.TEMPLATE,
    "llama": (
        "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 1) %}"
        "{% endif %}{{ '[INST] ' ~ m.content | trim ~ ' [/INST]' }}{% endfor %}{{ eos_token }}"
    ),
    "blocks": (
        "{%- set ns = namespace(last='') %}\n  {% for m in messages %}\n    {% if m.role == 'system' %}\n"
        "      {% continue %}\n    {% endif %}\n    {%- set ns.last = m.role %}\n"
        "{{ m.role | upper }}: {{ m.content }}\n"
        "    {% if loop.index > 2 %}{% break %}{% endif %}\n  {% endfor %}\n{{ ns.last }}"
    ),
    "tools": (
        "{% macro show(x) %}<{{ x | tojson(indent=2) }}>{% endmacro %}{% if tools %}{{ show(tools) }}{% endif %}"
        "{{ messages | tojson }}{% if tools is not none and documents is none %}!{% endif %}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "options": "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}{{ messages[0].content }}",
}


def make(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, tokens)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("args", [{}, {"tools": TOOLS}, {"enable_thinking": False}, {"add_generation_prompt": False}])
def test_text_is_that_of_transformers(name: str, args: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=small.byte_level(), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    expected = tokenizer.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], tokenize=False, **{"add_generation_prompt": True, **args}
    )
    ours = make(TEMPLATES[name], bos_token="<|im_start|>", eos_token="<|im_end|>")
    assert ours.render(CHAT, args) == expected


@pytest.mark.parametrize("last", ["So the answer", "spaces  ", [{"type": "text", "text": "in parts "}]])
@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_continuing_the_final_message_as_transformers_does(name: str, last: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source = TEMPLATES[name]
    if isinstance(last, list):
        part = "<{{ p.text if p is mapping else p }}>"
        source = "{% for m in messages %}{% for p in m.content %}" + part + "{% endfor %}{% endfor %}"
    chat = [*CHAT[1:2], {"role": "assistant", "content": last}]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=small.byte_level())
    expected = tokenizer.apply_chat_template(
        chat, chat_template=source, tokenize=False, continue_final_message=True, bos_token="", eos_token=""
    )
    assert make(source, bos_token="", eos_token="").render(chat, {"continue_final_message": True}) == expected


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="drops the final message"):
        make("{{ messages[0].content }}").render(CHAT, {"continue_final_message": True})
    with pytest.raises(InvalidRequest, match="no text to continue"):
        make("x").render([{"role": "user"}], {"continue_final_message": True})


def test_the_clock_is_passed_in() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, {}, lambda: datetime.datetime(2026, 1, 2))
    assert template.render(CHAT, {}) == "02 Jan 2026"


def test_none_means_absent() -> None:
    template = make("{{ messages[0].content }}{% if messages[0].tool_calls is defined %}!{% endif %}")
    assert template.render([{"role": "user", "content": "a", "tool_calls": None, "name": None}], {}) == "a"


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    template = make("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert template.render([message], {}) == '{"a": [1, "é"]}'
    assert call["function"]["arguments"] == '{"a": [1, "é"]}'  # type: ignore[index]  # the request is not changed
    call["function"] = {"name": "f", "arguments": "{"}
    with pytest.raises(InvalidRequest, match="arguments"):
        template.render([message], {})


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0]['content'] }}", "one\ntwo"),
        ("{% for m in messages %}{% for c in m['content'] %}[{{ c.text }}]{% endfor %}{% endfor %}", "[one][two]"),
        ("{% set x = messages[0].content %}{% for c in x %}[{{ c.text }}]{% endfor %}", "[one][two]"),
        (
            "{% macro f(content) %}{% for c in content %}[{{ c.text }}]{% endfor %}{% endmacro %}"
            "{{ f(messages[0].content) }}",
            "[one][two]",
        ),
    ],
)
def test_text_parts_in_the_form_that_the_template_reads(source: str, text: str) -> None:
    assert make(source).render([{"role": "user", "content": PARTS}], {}) == text


def test_other_parts_are_refused_by_a_text_template() -> None:
    with pytest.raises(InvalidRequest, match="text content only"):
        make("{{ messages[0].content }}").render([{"role": "user", "content": [{"type": "image_url"}]}], {})


def test_reasoning_under_either_name() -> None:
    template = make("{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}")
    for name in ("reasoning", "reasoning_content", "thinking"):
        assert template.render([{"role": "assistant", "content": "x", name: "hm"}], {}) == "hm|hm"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Roles must alternate') }}",
        "{{ 1 + messages[0].content }}",
        "{{ missing.deeper }}",
        "{{ messages[0].content.x.y }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make(source).render(CHAT, {})
    assert caught.value.param == "messages"


def test_words_of_the_template_are_told_in_full_and_input_is_cut() -> None:
    long = "conversation roles must alternate: user, assistant, user, assistant, and so on"
    with pytest.raises(InvalidRequest, match="and so on"):
        make("{{ raise_exception('" + long + "') }}").render(CHAT, {})
    with pytest.raises(InvalidRequest) as caught:
        make("{{ raise_exception('bad role ' + messages[0].role) }}").render([{"role": "r" * 500, "content": ""}], {})
    assert caught.value.message.count("r") < 100


@pytest.mark.parametrize("name", ["role", "absent", "items", "keys", "update", "__class__", "_x", "copy"])
def test_the_short_way_through_the_sandbox_ends_where_the_long_one_does(name: str) -> None:
    short, long = chat_template._Sandbox(), ImmutableSandboxedEnvironment()
    for obj in ({"role": "user", "items": 1, "_x": 2}, OrderedDict(role=1), [1], "text", 5, None):
        ours, theirs = short.getattr(obj, name), long.getattr(obj, name)
        assert type(ours) is type(theirs)
        assert ours == theirs or isinstance(theirs, Undefined)
        if isinstance(theirs, Undefined):
            assert ours._undefined_exception is theirs._undefined_exception


@pytest.mark.parametrize("name", ["first", "index", "previtem", "cycle", "__next__", "_iterator", "absent"])
def test_loops_in_the_sandbox(name: str) -> None:
    source = (
        "{% for i in [1, 2, 3] %}{{ loop." + name + " is defined }},{{ loop." + name + " is callable }} {% endfor %}"
    )
    expected = ImmutableSandboxedEnvironment().from_string(source).render()
    assert make(source).render(CHAT, {}) == expected


@pytest.mark.parametrize("messages", [[], ["text"], [None], [["role", "user"]]])
def test_messages_that_are_none(messages: list[object]) -> None:
    with pytest.raises(InvalidRequest):
        make("x").render(messages, {})


@pytest.mark.parametrize("name", ["chat_template", "messages"])
def test_a_request_cannot_bring_its_own_template(name: str) -> None:
    with pytest.raises(InvalidRequest):
        make("x").render(CHAT, {name: "{{ 1 }}"})


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100)
    template = make("{% for i in range(1000) %}x{% endfor %}")
    with pytest.raises(InvalidRequest, match="too long"):
        template.render(CHAT, {})


def test_no_template() -> None:
    template = ChatTemplate({}, {})
    assert not template.usable
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        template.render(CHAT, {})


def test_a_template_that_is_not_jinja() -> None:
    with pytest.raises(StartupError, match="not valid Jinja"):
        make("{% for %}")


def test_where_templates_lie(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": "from config", "bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    assert load_chat_template(tmp_path).render(CHAT, {}) == "from config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json {{ bos_token }}"}))
    assert load_chat_template(tmp_path).render(CHAT, {}) == "from json <s>"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert load_chat_template(tmp_path).render(CHAT, {}) == "from jinja"
    assert special_token_names(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_chat_template(tmp_path)
    assert template.render(CHAT, {}) == template.render(CHAT, {"tools": []}) == "plain"
    assert template.render(CHAT, {"tools": TOOLS}) == "with tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("newer")
    assert load_chat_template(tmp_path).render(CHAT, {"tools": TOOLS}) == "newer"


@pytest.mark.parametrize("content", ["[1]", "{", "\xff"])
def test_json_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(StartupError):
        read_json(tmp_path / "x.json")
    assert read_json(tmp_path / "absent.json") == {}
