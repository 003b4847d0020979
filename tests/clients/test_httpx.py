"""httpx over HTTP/1.1, HTTP/2 with prior knowledge, and TLS."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.clients.asking import SOON_S, chat, eventually, running, said, text_of
from tests.support import Server

JSON = {"content-type": "application/json"}
KINDS: dict[str, dict[str, Any]] = {
    "HTTP/1.1": {"http1": True, "http2": False},
    "HTTP/2": {"http1": False, "http2": True},
}


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=JSON, timeout=SOON_S, **KINDS[request.param]) as it:
        yield it


def test_whole_and_streamed_on_one_connection(client: httpx.Client) -> None:
    for number in range(5):
        word = f"httpx{number}"
        answer = client.post("/v1/chat/completions", content=chat(word, 60, stream=False))
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == said(word, 60)
        with client.stream("POST", "/v1/chat/completions", content=chat(word, 60)) as stream:
            assert text_of(b"".join(stream.iter_bytes())) == said(word, 60)
    assert answer.http_version in KINDS


def test_a_body_sent_in_pieces(client: httpx.Client) -> None:
    """Over HTTP/1.1 it is chunked; over HTTP/2 httpx ends it with an empty DATA frame."""
    body = chat("pieces", 40) + b" " * 200_000
    pieces = (body[i : i + 7001] for i in range(0, len(body), 7001))
    answer = client.post("/v1/chat/completions", content=pieces)
    assert text_of(answer.content) == said("pieces", 40)


def test_errors_leave_the_connection_usable(client: httpx.Client) -> None:
    for path, status in (("/nowhere", 404), ("/v1/chat/completions", 400), ("/health", 405)):
        answer = client.post(path, content=b"{}")
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("kind", KINDS)
def test_tls(start_server: Callable[..., Server], kind: str) -> None:
    server = start_server("--tls", "self-signed", "--synthetic-step-ms", "0")
    with httpx.Client(verify=_trusting(), base_url=server.url, headers=JSON, timeout=SOON_S, **KINDS[kind]) as client:
        answer = client.post("/v1/chat/completions", content=chat("tls", 30))
        assert answer.http_version == kind
        assert text_of(answer.content) == said("tls", 30)


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_leaving_an_http_1_stream_early(start_server: Callable[..., Server]) -> None:
    server = start_server("--synthetic-step-ms", "5")
    with httpx.Client(base_url=server.url, headers=JSON, timeout=SOON_S) as client:
        with client.stream("POST", "/v1/chat/completions", content=chat("left", 100_000, ignore_eos=True)) as stream:
            next(stream.iter_bytes())
        eventually(running(server, 0), "the answer is still being generated")
        assert client.get("/health").status_code == 200
