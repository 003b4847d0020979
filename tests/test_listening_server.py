"""A server on UNIX sockets, and on sockets that it was started with."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.clients.asking import chat, program, run, said, text_of
from tests.support import STOP_TIMEOUT_S, Server

JSON = {"content-type": "application/json"}


def ask(url: str, word: str, **transport: object) -> str:
    """The text of a streamed answer."""
    with httpx.Client(timeout=STOP_TIMEOUT_S, transport=httpx.HTTPTransport(**transport)) as client:  # type: ignore[arg-type]
        return text_of(client.post(url + "/v1/chat/completions", headers=JSON, content=chat(word, 20)).content)


@pytest.mark.client
@pytest.mark.parametrize("flags", [["--http2-prior-knowledge"], ["--http1.1"]], ids=["h2c", "http1"])
def test_curl_over_a_unix_socket(flags: list[str], start_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start_server("--uds", str(path), "--synthetic-step-ms", "0")
    assert f"also at unix:{path}" in server.log
    done = run(
        program("curl"), "-sSN", *flags, "--unix-socket", str(path), "http://localhost/v1/chat/completions",
        "-H", "content-type: application/json", "-d", chat("curl", 30).decode(), "-w", "%{http_version}",
    )  # fmt: skip
    body, version = done.stdout[:-1].removesuffix(b"1."), done.stdout[-1:]
    assert text_of(body) == said("curl", 30)
    assert version == (b"2" if "2" in flags[0] else b"1")


def test_a_unix_socket_in_place_of_a_port(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = Server("--engine", "synthetic", "--host", "none", "--uds", str(path), "--synthetic-step-ms", "0")
    try:
        server.wait_log(f"ready at unix:{path} in ")
        assert ask("http://localhost", "local", uds=str(path)) == said("local", 20)
        server.wait_log(r"exchange: .* peer=unix")
        assert server.stop() == 0
        assert not path.exists()
    finally:
        server.kill()


def test_a_killed_servers_socket_is_taken_over(start_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = Server("--engine", "synthetic", "--port", "0", "--uds", str(path))
    try:
        first.wait_ready()
        refused = Server("--engine", "synthetic", "--port", "0", "--uds", str(path))
        refused.wait_log("error: another server listens on")
        assert refused.process.wait(STOP_TIMEOUT_S) == 2
        refused.kill()
    finally:
        first.kill()
    assert path.exists()
    start_server("--uds", str(path), "--synthetic-step-ms", "0")
    assert ask("http://localhost", "next", uds=str(path)) == said("next", 20)


def test_sockets_of_a_service_manager(tmp_path: Path) -> None:
    """Several descriptors from 3 on; the file of a UNIX socket stays: it is the manager's."""
    path = tmp_path / "s"
    server = Server(
        "2", str(path), "--engine", "synthetic", "--synthetic-step-ms", "0", "--log-format", "json",
        module=("tests.activate",),
    )  # fmt: skip
    try:
        server.wait_log('"msg": "ready"')
        assert "8000" not in server.log  # the default port is not opened beside them
        port = int(server.wait_log(r'"port": (\d+)')[1])
        assert port
        assert ask("http://localhost", "unix", uds=str(path)) == said("unix", 20)
        for number in _ports(server.process.pid):
            assert ask(f"http://127.0.0.1:{number}", f"tcp{number}") == said(f"tcp{number}", 20)
        assert len(_ports(server.process.pid)) == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) == 0
        assert path.exists()
    finally:
        server.kill()


def _ports(pid: int) -> set[int]:
    from tests.listeners import tcp_ports

    return tcp_ports([pid])


def test_random_bytes_on_a_unix_socket_hurt_nobody(start_server: Callable[..., Server], tmp_path: Path) -> None:
    import random

    path, dice = str(tmp_path / "s"), random.Random(86)
    server = start_server("--uds", path, "--synthetic-step-ms", "0")
    for size in [1, 10, 100, 1000, 10_000] * 6:
        with socket.socket(socket.AF_UNIX) as rude:
            rude.settimeout(STOP_TIMEOUT_S)
            rude.connect(path)
            try:
                rude.sendall(dice.randbytes(size))
                rude.shutdown(socket.SHUT_WR)
                while rude.recv(65_536):
                    pass
            except OSError:
                pass  # it was closed before all was sent
    assert ask("http://localhost", "polite", uds=path) == said("polite", 20)
    assert not re.search(" error ", server.log)
