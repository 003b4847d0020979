"""Clients that go away while the engine says nothing: it must hear of it at once, not at its next token.

The engine is silent for ten minutes here, so what is noticed at all was noticed by the read side.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.clients.asking import HERE, SOON_S, chat, eventually, gauge, program, running, said
from tests.support import Server

SILENT = ("--synthetic-ttft-ms", "600000")


@pytest.fixture
def silent(start_server: Callable[..., Server]) -> Server:
    return start_server(*SILENT, "--drain-timeout-s", "0")


def test_one_of_ten_streams_is_reset(start_server: Callable[..., Server]) -> None:
    """granian issue 917: RST_STREAM while the connection lives on. The other nine never notice."""
    server = start_server("--synthetic-ttft-ms", str(SOON_S * 1e3 / 4), "--synthetic-step-ms", "1")
    with _node("leave.mjs", server.url, "50") as client:
        assert _say(client) == "open"
        assert running(server, 10)()
        assert _say(client, "reset 4") == "reset"
        eventually(running(server, 9), "stream 4 still runs")
        answer = json.loads(_say(client, "end"))
    assert answer["codes"] == [0, 0, 0, 0, 8, 0, 0, 0, 0, 0]
    for number, body in enumerate(answer["texts"]):
        if number != 4:
            events = [e.removeprefix("data: ") for e in body.split("\n\n") if e.startswith("data: ")]
            assert events.pop() == "[DONE]"
            assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == said(f"stream{number}", 50)
    server.wait_log(r"end=client_reset")


class _node:
    """A script of this folder with pipes."""

    def __init__(self, script: str, *args: str) -> None:
        self.process = subprocess.Popen(
            [program("node"), str(HERE / script), *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=SOON_S)


def _say(client: subprocess.Popen[str], line: str = "") -> str:
    assert client.stdin is not None
    assert client.stdout is not None
    if line:
        client.stdin.write(line + "\n")
        client.stdin.flush()
    return client.stdout.readline().strip()


@pytest.fixture(params=["--http1.1", "--http2-prior-knowledge"])
def option(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["streamed", "whole"])
def waiting(request: pytest.FixtureRequest, silent: Server, option: str) -> Iterator[subprocess.Popen[bytes]]:
    """A curl that waits for an answer, streamed or whole."""
    command = [program("curl"), "-sN", option, "-H", "content-type: application/json", "-d", "@-"]
    curl = subprocess.Popen([*command, f"{silent.url}/v1/chat/completions"], stdin=subprocess.PIPE)
    assert curl.stdin is not None
    curl.stdin.write(chat("never", 50, stream=request.param))
    curl.stdin.close()
    eventually(running(silent, 1), "the request did not reach the engine")
    yield curl
    curl.kill()
    curl.wait(SOON_S)


def test_a_killed_client(silent: Server, waiting: subprocess.Popen[bytes]) -> None:
    """llama.cpp issue 24496, vllm-project/router pull request 215: streamed and whole answers alike."""
    waiting.kill()
    eventually(running(silent, 0), "it still runs")
    silent.wait_log(r"end=client_gone")


def test_a_client_that_resets_its_connection(silent: Server) -> None:
    body = chat("never", 50)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((silent.host, silent.port)) as connection:
        connection.sendall(head + body)
        eventually(running(silent, 1), "the request did not reach the engine")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close sends RST
    eventually(running(silent, 0), "it still runs")


def test_a_client_that_half_closes_gets_what_needs_no_engine(silent: Server) -> None:
    """As `printf ... | nc -N` does; an answer that is still being generated is given up (rule 4 of http1.py)."""
    with socket.create_connection((silent.host, silent.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'{"status":"ok"}')


def test_many_short_visits_leave_nothing_behind(start_server: Callable[..., Server]) -> None:
    """vllm issue 57061: clients that leave while their request is being admitted."""
    server = start_server(*SILENT, "--drain-timeout-s", "0")
    body = chat("never", 50)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for number in range(300):
        with socket.create_connection((server.host, server.port)) as connection:
            connection.sendall((head + body)[: len(head) + len(body) - number % 2])
    eventually(running(server, 0), "generations are left over")
    eventually(lambda: _open(server) == 0, "exchanges are left over")


def _open(server: Server) -> float:
    return gauge(server, "evap_open_exchanges") + gauge(server, "evap_body_bytes")
