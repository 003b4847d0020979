"""SIGTERM: what runs is finished, what is new is refused, and a second signal does not wait."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.clients.asking import HERE, SOON_S, chat, eventually, program, running, said, text_of
from tests.support import STOP_TIMEOUT_S, Server

JSON = {"content-type": "application/json"}
KINDS: dict[str, dict[str, Any]] = {
    "HTTP/1.1": {"http1": True, "http2": False},
    "HTTP/2": {"http1": False, "http2": True},
}
FOREVER = {"ignore_eos": True}  # the synthetic engine would end after 128 tokens
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("kind", KINDS)
def test_running_streams_finish(start_server: Callable[..., Server], kind: str) -> None:
    """vllm issue 24885; over HTTP/2 no GOAWAY may come while httpx has streams, because it would drop them."""
    server = start_server("--synthetic-step-ms", "40")
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=server.url, headers=JSON, timeout=SOON_S, limits=limits, **KINDS[kind]) as client:
        ask = lambda n: client.post("/v1/chat/completions", content=chat(f"drain{n}", 100)).content  # noqa: E731
        with ThreadPoolExecutor(20) as pool:
            answers = []
            for n in range(20):  # one after the other: two threads of httpx may write their HEADERS in the wrong order
                answers.append(pool.submit(ask, n))
                eventually(running(server, n + 1), "the requests did not reach the engine")
            server.process.send_signal(signal.SIGTERM)
            texts = [text_of(answer.result()) for answer in answers]
    assert texts == [said(f"drain{n}", 100) for n in range(20)]
    assert server.process.wait(STOP_TIMEOUT_S) == 0


@pytest.mark.parametrize("kind", ["fetch", "http2"])
def test_running_streams_of_node_finish(start_server: Callable[..., Server], kind: str) -> None:
    """undici, like httpx, drops what runs when it sees GOAWAY; node:http2 does not."""
    server = start_server("--synthetic-step-ms", "20")
    command = [program("node"), str(HERE / "drain.mjs"), server.url, kind, "20", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "running\n"
        server.process.send_signal(signal.SIGTERM)
        assert json.loads(client.communicate(timeout=SOON_S)[0]) == {"ok": 20, "wrong": []}
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_running_streams_of_undici_over_http2_finish(start_server: Callable[..., Server]) -> None:
    """undici (the one inside node) with allowH2 ends every stream of a connection at a GOAWAY: none may come while they
    run. A new request is refused meanwhile, or waits, and goes to the next server; it harms none that runs."""
    flags = ("--tls", "self-signed", "--synthetic-step-ms")
    server = start_server(*flags, "40")
    command = [program("node"), "--no-warnings", str(HERE / "undici.mjs"), server.url, "20", "100"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdin is not None
        assert client.stdout.readline() == "running\n"
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        client.stdin.write("late\n")
        client.stdin.flush()
        assert client.stdout.readline() == "ended\n"
        assert server.process.wait(STOP_TIMEOUT_S) == 0
        successor = start_server(*flags, "1", "--port", str(server.port))
        found = json.loads(client.communicate("go on\n", timeout=SOON_S)[0])
    assert (found["ok"], found["wrong"], found["moved"]) == (20, [], None)
    assert found["late"]["said"] is not None, "it was answered by a server that drains"
    exchanges = [line for line in server.log.splitlines() if "end=length" in line]
    assert (len(exchanges), len({re.search(r"peer=(\S+)", line)[1] for line in exchanges})) == (20, 1)  # type: ignore[index]
    assert all(" version=2 " in line for line in exchanges)
    assert " version=2 " in successor.wait_log("exchange: .*")[0]


def test_new_requests_are_refused(start_server: Callable[..., Server]) -> None:
    server = start_server("--synthetic-ttft-ms", "600000", "--drain-timeout-s", str(SOON_S))
    with socket.create_connection((server.host, server.port)) as running_one:
        body = chat("never", 5, stream=False)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        running_one.sendall(head + body)
        eventually(running(server, 1), "the request did not reach the engine")
        with socket.create_connection((server.host, server.port)) as arriving:
            arriving.settimeout(SOON_S)
            arriving.sendall(HEALTH)
            assert arriving.recv(4096).startswith(b"HTTP/1.1 200")
            arriving.sendall(HEALTH[:20])
            server.process.send_signal(signal.SIGTERM)
            server.wait_log("draining")
            arriving.sendall(HEALTH[20:])
            answer = b"".join(iter(lambda: arriving.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 503")
            assert b'"draining"' in answer
        refused = _fresh(server)
        assert refused is None or refused == b"" or refused.startswith(b"HTTP/1.1 503"), refused
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) == 1


def _fresh(server: Server) -> bytes | None:
    """What a new connection is told; None when there is none."""
    try:
        with socket.create_connection((server.host, server.port), SOON_S) as connection:
            connection.sendall(HEALTH)
            return connection.recv(4096)
    except OSError:
        return None


def test_the_deadline_ends_a_stream_with_an_error_event(start_server: Callable[..., Server]) -> None:
    server = start_server("--synthetic-step-ms", "20", "--drain-timeout-s", "0.2")
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        headers=JSON,
        content=chat("long", 100_000, **FOREVER),
        timeout=SOON_S,
    ) as stream:
        parts = stream.iter_bytes()
        seen = next(parts)
        server.process.send_signal(signal.SIGTERM)
        seen += b"".join(parts)
    assert b'"draining"' in seen
    assert seen.endswith(b"data: [DONE]\n\n")
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_a_second_signal_does_not_wait(start_server: Callable[..., Server]) -> None:
    server = start_server("--synthetic-step-ms", "20", "--drain-timeout-s", str(10 * STOP_TIMEOUT_S))
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        headers=JSON,
        content=chat("long", 100_000, **FOREVER),
        timeout=SOON_S,
    ) as stream:
        parts = stream.iter_bytes()  # closed with its last reference
        next(parts)
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) == 1
