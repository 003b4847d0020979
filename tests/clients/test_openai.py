"""openai-python as people use it, and with HTTP/2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.clients.asking import SOON_S, eventually, running, said
from tests.support import Server

HTTP2: dict[str, Any] = {"http1": False, "http2": True}


@pytest.fixture(params=["default", "http2"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(**HTTP2) if request.param == "http2" else None
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SOON_S, http_client=http) as it:
        yield it


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["synthetic"]


def test_chat(client: openai.OpenAI) -> None:
    ask = {"model": "synthetic", "messages": [{"role": "user", "content": "canary:openai please"}], "max_tokens": 50}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert whole.choices[0].message.content == said("openai", 50)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 50
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options=options))  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == said("openai", 50)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 50


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="synthetic", prompt="canary:old", max_tokens=12)
    assert answer.choices[0].text == said("old", 12)
    parts = client.completions.create(model="synthetic", prompt="canary:old", max_tokens=12, stream=True)
    assert "".join(part.choices[0].text for part in parts) == said("old", 12)


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="synthetic", messages=[{"role": "user", "content": "x"}], temperature=9)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("kind", ["default", "http2"])
def test_an_early_break_stops_the_engine(start_server: Callable[..., Server], kind: str) -> None:
    """The default client closes its connection. httpcore resets no HTTP/2 stream that is given up; closing does it."""
    server = start_server("--synthetic-step-ms", "5")
    http = openai.DefaultHttpxClient(**HTTP2) if kind == "http2" else None
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SOON_S, http_client=http) as client:
        stream = client.completions.create(
            model="synthetic", prompt="canary:go", max_tokens=100_000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert running(server, 1)()
        stream.close()
        if kind == "default":
            eventually(running(server, 0), "the answer is still being generated")
    eventually(running(server, 0), "the answer is still being generated")
