"""The server as a process: how it starts, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support import STOP_TIMEOUT_S, Server, running

StartServer = Callable[..., Server]
FOREVER = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 100_000, "stream": True}


def get(url: str, **settings: Any) -> httpx.Response:
    return httpx.get(url, timeout=STOP_TIMEOUT_S, trust_env=False, **settings)


def refused(*argv: str, **env: str) -> str:
    """stderr of a server that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "evap", "serve", "--engine", "synthetic", *argv],
        capture_output=True, text=True, timeout=STOP_TIMEOUT_S, check=False, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    return done.stderr


def test_it_answers_on_the_port_that_it_prints(server: Server) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert get(server.url + "/health").status_code == 200
    assert get(server.url + "/ready").status_code == 200
    assert get(server.url + "/version").json()["version"] in server.log


@pytest.mark.client
@pytest.mark.parametrize("flags", [(), ("--tls", "self-signed")], ids=["h2c", "tls"])
def test_the_curl_line_of_the_banner_works_when_pasted(flags: tuple[str, ...], start_server: StartServer) -> None:
    version = (
        subprocess.run(["curl", "-V"], capture_output=True, text=True, check=False).stdout
        if shutil.which("curl")
        else ""
    )
    if "HTTP2" not in version:
        pytest.skip("needs curl with HTTP/2")
    server = start_server("--synthetic-step-ms", "0", *flags)
    line = server.wait_log(r"(?m)^  try     (curl .*)$")[1]
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=STOP_TIMEOUT_S, check=True)
    assert done.stdout.startswith("data: {")
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_a_taken_port_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert (
            refused("--port", str(port))
            == f"error: port {port} on 127.0.0.1 is taken\n  try: --port 0 picks a free one\n"
        )


def test_an_address_of_another_machine() -> None:
    text = refused("--host", "192.0.2.1", "--port", "0")  # TEST-NET-1, RFC 5737
    assert text.startswith("error: cannot listen on 192.0.2.1:0")
    assert len(text.splitlines()) == 2


def test_a_missing_certificate_is_named() -> None:
    text = refused("--port", "0", "--tls-cert", "/nonexistent.pem", "--tls-key", "/nonexistent.key")
    assert text.startswith("error: ")
    assert "/nonexistent.pem" in text


def test_options_from_the_environment() -> None:
    with running(env={"EVAP_SERVED_MODEL_NAME": "renamed"}) as server:
        assert get(server.url + "/v1/models").json()["data"][0]["id"] == "renamed"


def test_json_lines_only() -> None:
    server = Server("--engine", "synthetic", "--port", "0", "--log-format", "json")
    try:
        url = json.loads(server.wait_log(r'(?m)^\{"msg": "ready".*$')[0])["url"]
        body = {"messages": [{"role": "user", "content": "a secret of mine"}], "max_tokens": 3}
        assert httpx.post(url + "/v1/chat/completions", json=body, trust_env=False).status_code == 200
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
    finally:
        server.kill()
    (exchange,) = [line for line in lines if line["msg"] == "exchange"]
    assert (exchange["status"], exchange["end"], exchange["emitted_tokens"]) == (200, "length", 3)
    assert "secret" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_with_code_0(number: signal.Signals, start_server: StartServer) -> None:
    server = start_server()
    server.process.send_signal(number)
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_a_stream_that_is_not_over_at_the_deadline_gets_an_error_event(start_server: StartServer) -> None:
    server = start_server("--drain-timeout-s", "0.2", "--synthetic-step-ms", "5")
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=FOREVER, timeout=STOP_TIMEOUT_S, trust_env=False
    ) as r:
        lines = r.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "draining"
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_a_running_stream_may_finish_while_the_server_drains(start_server: StartServer) -> None:
    server = start_server("--synthetic-step-ms", "20")
    body = {**FOREVER, "max_tokens": 30}
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=body, timeout=STOP_TIMEOUT_S, trust_env=False
    ) as r:
        lines = r.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_a_second_signal_ends_at_once() -> None:
    server = Server("--engine", "synthetic", "--port", "0", "--drain-timeout-s", "3600", "--synthetic-step-ms", "50")
    try:
        server.wait_ready()
        with httpx.stream(
            "POST", server.url + "/v1/chat/completions", json=FOREVER, timeout=STOP_TIMEOUT_S, trust_env=False
        ) as r:
            lines = r.iter_lines()  # kept: without it the response would be closed
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_log("draining: 1 open")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(STOP_TIMEOUT_S) == 1  # it did not wait an hour for the stream
        server.check_log()
    finally:
        server.kill()


def test_the_log_of_a_client_that_leaves_is_information(start_server: StartServer) -> None:
    server = start_server("--synthetic-step-ms", "5")
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=FOREVER, timeout=STOP_TIMEOUT_S, trust_env=False
    ) as r:
        next(r.iter_lines())
    line = server.wait_log(r"(?m)^.* exchange: id=.*$")[0]
    assert " info " in line
    assert "end=client_gone" in line


def test_sighup_while_it_still_starts_changes_nothing() -> None:
    from evap.config import Config
    from evap.server import Server as Process

    Process(Config())._reload()
