"""What the renderers write is what OpenAI's own client types expect, with every required member present."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evap.messages import Choice, LogprobText, ParsedRequest, SamplingParams, Usage
from evap.protocol.api.dialect import Renderer
from evap.protocol.api.models import ModelCard, list_body
from evap.protocol.api.router import dialects

types = pytest.importorskip("openai.types", reason="the openai package is not installed")
chat_types = pytest.importorskip("openai.types.chat", reason="the openai package is not installed")

USAGE = Usage(prompt=3, cached=1, computed=2, emitted=2)
LOGPROBS = [LogprobText(text="a", logprob=-0.5, data=b"a", top=(("a", -0.5, b"a"), ("b", -1.0, b"b")))]
CASES = [
    ("chat", chat_types.ChatCompletionChunk, chat_types.ChatCompletion),
    ("completions", types.Completion, types.Completion),
]


def renderer(name: str, logprobs: int | None) -> Renderer:
    request = ParsedRequest(model=None, sampling=SamplingParams(logprobs=logprobs), stream=True, include_usage=True)
    return dialects()[name].renderer(request, id_suffix="x" * 24, model="m", created_s=1_700_000_000)


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize(("name", "chunk", "whole"), CASES)
def test_answers(name: str, chunk: Any, whole: Any, logprobs: int | None) -> None:
    r = renderer(name, logprobs)
    entries = LOGPROBS if logprobs else None
    answer = whole.model_validate_json(
        r.whole([Choice(index=0, text="a", finish_reason="stop", logprobs=entries)], USAGE)
    )
    assert answer.usage.total_tokens == 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.choices[0].finish_reason == "stop"
    events = [*r.prelude(0).split(b"\n\n"), r.delta(0, "a", entries), r.usage(USAGE)]
    if name == "chat":  # the type of the older dialect has no null finish_reason, though the service sends it
        row = r.row(0)
        events += [] if row is None else [b'a"   '.join(row)]
        for event in filter(None, events):
            chunk.model_validate_json(event[6:])
    final = chunk.model_validate_json(r.finish(0, "length")[6:])
    assert final.choices[0].finish_reason == "length"
    assert final.usage is None


def test_models() -> None:
    listing = msgspec.json.decode(list_body([ModelCard(id="m", created=1)]))
    assert listing["object"] == "list"
    assert types.Model.model_validate(listing["data"][0]).id == "m"
