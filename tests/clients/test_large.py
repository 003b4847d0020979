"""Large prompts and slow readers: they are nobody else's concern."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.clients.asking import SOON_S, chat, eventually, gauge, node, running, said, text_of
from tests.support import Server

JSON = {"content-type": "application/json"}
PROMPT_BYTES = 30 << 20


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_health_answers_while_a_large_prompt_is_taken(start_server: Callable[..., Server], http2: bool) -> None:
    """vllm issue 24910: 27 MB froze /health for 28.8 s. This prompt does not fit the context: 400, after all of it."""
    server = start_server()
    body = json.dumps({"prompt": "word " * (PROMPT_BYTES // 5), "max_tokens": 4}).encode()
    answers = 0
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=server.url, timeout=SOON_S) as probe,
        httpx.Client(base_url=server.url, headers=JSON, timeout=6 * SOON_S, http1=not http2, http2=http2) as client,
    ):
        sending = pool.submit(client.post, "/v1/completions", content=body)
        while not sending.done():
            assert probe.get("/health").status_code == 200  # in SOON_S, or httpx raises
            answers += 1
    answer = sending.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answers > 1
    assert gauge(server, "evap_body_bytes") == 0


def test_one_stalled_stream_and_nine_readers(start_server: Callable[..., Server]) -> None:
    """hyper issue 2899: a stream whose reader takes nothing holds at most its budget, and holds up nobody.

    When it reads again it gets all of its text: what was held back comes coalesced.
    """
    server = start_server("--synthetic-step-ms", "0", "--synthetic-tokens", "4000")
    report = node("stalled.mjs", server.url, "4000")
    assert report["readers"] == [True] * 9
    assert report["stalledHadEnded"] is False
    assert report["stalled"] == said("stalled", 4000)


def test_readers_of_http_1_that_take_nothing(start_server: Callable[..., Server]) -> None:
    """Their tokens coalesce, memory stays bounded, and others are served; when they read, everything is there."""
    server = start_server("--synthetic-step-ms", "0", "--synthetic-tokens", "100000")
    tokens, body = 10_000, chat("slow", 10_000)
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    readers = [_reader(server) for _ in range(8)]
    try:
        before = gauge(server, "process_resident_memory_bytes")
        for reader in readers:
            reader.sendall(request + body)
        with httpx.Client(base_url=server.url, headers=JSON, timeout=6 * SOON_S) as client:
            assert text_of(client.post("/v1/chat/completions", content=chat("quick", 500)).content) == said(
                "quick", 500
            )
        eventually(running(server, 0), "the engine waits for a reader", 6 * SOON_S)
        grown = gauge(server, "process_resident_memory_bytes") - before
        assert grown < 8 << 20, grown  # 8 x 2 MB of events were made
        for reader in readers:
            assert text_of(_unchunked(_read(reader))) == said("slow", tokens)
    finally:
        for reader in readers:
            reader.close()


def _reader(server: Server) -> socket.socket:
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.settimeout(SOON_S)
    reader.connect((server.host, server.port))
    return reader


def _read(reader: socket.socket) -> bytes:
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    return b"".join(iter(lambda: reader.recv(1 << 20), b""))


def _unchunked(answer: bytes) -> bytes:
    _, _, rest = answer.partition(b"\r\n\r\n")
    parts: list[bytes] = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if size == b"0":
            return b"".join(parts)
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
