"""Large bodies go through the intake process: same answers, and nobody waits for them; its end and the server's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.clients.asking import SOON_S, eventually, gauge, running, said
from tests.support import Server
from tests.support import running as server_running

JSON = {"content-type": "application/json"}
CONTEXT = ("--max-model-len", "10000000", "--synthetic-step-ms", "0")
WORDS = "word " * 300_000
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("completions", {"prompt": WORDS + "canary:large "}),
    "echo": ("completions", {"prompt": WORDS + "canary:echo ", "echo": True}),
    "ids": ("completions", {"prompt": [65, 66, 67] * 200_000}),
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": WORDS}, {"role": "user", "content": "x"}]}),
    "bad id": ("completions", {"prompt": [65] * 600_000 + [10**6]}),
    "bad role": ("chat/completions", {"messages": [{"role": "user", "content": WORDS}, {"role": "no", "content": ""}]}),
    "no such model": ("completions", {"prompt": WORDS, "model": "no"}),
    "empty": ("completions", {"prompt": "", "user": "x", "metadata": WORDS}),
    "not JSON": ("completions", {}),
}


@pytest.fixture(scope="module")
def both() -> Iterator[list[Server]]:
    """With and without the intake process."""
    with server_running(*CONTEXT) as one, server_running(*CONTEXT, "--large-body-bytes", "0") as other:
        yield [one, other]


def children(server: Server) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(server.process.pid).children()
    return found


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
@pytest.mark.parametrize("name", PROMPTS)
def test_the_same_answers(both: list[Server], name: str, http2: bool) -> None:
    path, fields = PROMPTS[name]
    body = json.dumps({"max_tokens": 20, "seed": 1, **fields}).encode()
    if not fields:
        body = b'{"prompt": "' + b"x" * (2 << 20)
    answers = []
    for server in both:
        with httpx.Client(base_url=server.url, headers=JSON, timeout=SOON_S, http1=not http2, http2=http2) as client:
            answer = client.post(f"/v1/{path}", content=body)
        answers.append((answer.status_code, {**answer.json(), "id": "", "created": 0}))
        assert gauge(server, "evap_body_bytes") == 0
    assert answers[0] == answers[1]
    assert len(children(both[0])) == 1
    assert children(both[1]) == []
    if name == "text":
        assert answers[0][1]["choices"][0]["text"] == said("large", 20)


def test_a_large_body_where_none_is_wanted(both: list[Server]) -> None:
    with httpx.Client(base_url=both[0].url, headers=JSON, timeout=SOON_S) as client:
        assert client.post("/health", content=bytes(3 << 20)).status_code == 405
    assert gauge(both[0], "evap_body_bytes") == 0


def bodies(server: Server) -> int:
    """Memory files of bodies and prompts that the server holds."""
    return Path(f"/proc/{server.process.pid}/maps").read_text().count("memfd:evap-body")


def test_what_was_served_is_free_at_once(both: list[Server]) -> None:
    """Not when the collector comes, nor when its deadline would have."""
    server = both[0]
    body = json.dumps({"prompt": WORDS, "max_tokens": 3}).encode()
    with httpx.Client(base_url=server.url, headers=JSON, timeout=SOON_S) as client:
        for _ in range(3):
            assert client.post("/v1/completions", content=body).status_code == 200
            late = {"evap-deadline-ms": "86400000"}
            assert client.post("/v1/completions", content=body, headers=late).status_code == 200
    eventually(lambda: bodies(server) == 0, "no body is held")


def test_a_client_that_leaves_while_its_prompt_is_tokenized(both: list[Server]) -> None:
    server = both[0]
    body = json.dumps({"prompt": WORDS * 20, "max_tokens": 1}).encode()
    with httpx.Client(base_url=server.url, headers=JSON, timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", content=body)
    eventually(lambda: gauge(server, "evap_open_exchanges") == 0, "the exchange ends")
    eventually(running(server, 0), "nothing runs")
    assert gauge(server, "evap_body_bytes") == 0
    with httpx.Client(base_url=server.url, headers=JSON, timeout=SOON_S) as client:
        path, fields = PROMPTS["text"]
        assert client.post(f"/v1/{path}", content=json.dumps({**fields, "max_tokens": 2}).encode()).status_code == 200


def test_the_process_dies_and_the_server_does_not(start_server: Callable[..., Server]) -> None:
    server = start_server(*CONTEXT)
    path, fields = PROMPTS["text"]
    body = json.dumps({**fields, "max_tokens": 2}).encode()
    with httpx.Client(base_url=server.url, headers=JSON, timeout=SOON_S) as client:
        for _ in range(2):
            assert client.post(f"/v1/{path}", content=body).status_code == 200
            (child,) = children(server)
            os.kill(child.pid, signal.SIGKILL)
            eventually(lambda: children(server) == [], "it is reaped")


def test_the_process_ends_with_a_server_that_is_killed(start_server: Callable[..., Server]) -> None:
    server = start_server(*CONTEXT)
    body = json.dumps({"prompt": WORDS * 20, "max_tokens": 1}).encode()
    with httpx.Client(base_url=server.url, headers=JSON, timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", content=body)
    (child,) = children(server)
    os.kill(server.process.pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{child.pid}").exists() or child.status() == "zombie", "it is gone")
