"""nghttp (another HTTP/2 implementation, with push and PRIORITY) and h2load."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.asking import chat, program, run, said, text_of
from tests.support import Server

JSON = "content-type: application/json"


def request_file(directory: Path, body: bytes) -> str:
    path = directory / "body.json"
    path.write_bytes(body)
    return str(path)


def test_a_streamed_answer(server: Server, tmp_path: Path) -> None:
    body = request_file(tmp_path, chat("nghttp", 60))
    done = run(program("nghttp"), "-d", body, "-H", JSON, f"{server.url}/v1/chat/completions")
    assert text_of(done.stdout) == said("nghttp", 60)


def test_frames_of_an_answer(server: Server) -> None:
    """Its first stream is 13, with PRIORITY frames for idle streams before it."""
    log = run(program("nghttp"), "-v", f"{server.url}/health").stdout.decode(errors="replace")
    assert re.search(r"recv \(stream_id=13\) .*:status: .*200", re.sub(r"\x1b\[\S*?m", "", log))
    assert "RST_STREAM" not in log


def test_a_body_that_is_too_large(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--max-body-bytes", "100000")
    body = request_file(tmp_path, b"x" * (3 << 20))
    log = run(program("nghttp"), "-v", "-d", body, "-H", JSON, f"{server.url}/v1/chat/completions").stdout
    plain = re.sub(rb"\x1b\[\S*?m", b"", log).decode(errors="replace")
    assert re.search(r"recv \(stream_id=13\) :status: 413", plain)
    assert "body_too_large" in plain


@pytest.mark.parametrize(
    "options", [["-c", "4", "-m", "25"], ["--h1", "-c", "20", "-m", "1"], ["--h1", "-c", "4", "-m", "5"]]
)
def test_h2load(server: Server, tmp_path: Path, options: list[str]) -> None:
    """All 200 succeed, also pipelined (`--h1 -m 5`); h2load sends its first burst before it has read our SETTINGS."""
    body = request_file(tmp_path, chat("h2load", 40))
    command = [program("h2load"), "-n", "200", *options, "-d", body, "-H", JSON]
    report = run(*command, f"{server.url}/v1/chat/completions").stdout.decode()
    assert "200 succeeded, 0 failed, 0 errored, 0 timeout" in report, report
    assert "200 2xx, 0 3xx, 0 4xx, 0 5xx" in report, report


def test_h2load_over_tls(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--tls", "self-signed", "--synthetic-step-ms", "0")
    body = request_file(tmp_path, chat("h2load", 40))
    command = [program("h2load"), "-n", "200", "-c", "4", "-m", "25", "-d", body, "-H", JSON]
    report = run(*command, f"{server.url}/v1/chat/completions").stdout.decode()
    assert "Application protocol: h2" in report
    assert "200 succeeded, 0 failed, 0 errored, 0 timeout" in report, report
