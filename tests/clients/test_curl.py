"""curl over every protocol that it speaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.asking import chat, program, run, said, text_of
from tests.support import Server
from tests.support import running as server_running

VERSIONS = {"--http1.0": "1.1", "--http1.1": "1.1", "--http2": "1.1", "--http2-prior-knowledge": "2"}
BIG = 3 << 20


def curl(server: Server, path: str, *args: str, body: bytes | None = None) -> tuple[int, str, bytes]:
    """(status, HTTP version, body)"""
    data = ["--data-binary", "@-", "-H", "content-type: application/json"] if body is not None else []
    command = [program("curl"), "-sSN", "-w", "\n%{http_code} %{http_version}", *data, *args, server.url + path]
    out, _, last = run(*command, input=body).stdout.rpartition(b"\n")
    status, version = last.decode().split()
    return int(status), version, out


@pytest.mark.parametrize(("option", "version"), VERSIONS.items())
def test_stream_and_whole(server: Server, option: str, version: str) -> None:
    """`--http2` sends Upgrade: h2c, as JDK clients do (vllm issue 57203): ignored, and the body is intact."""
    status, spoken, out = curl(server, "/v1/chat/completions", option, body=chat("curl-1", 50))
    assert (status, spoken, text_of(out)) == (200, version, said("curl-1", 50))
    status, spoken, out = curl(server, "/v1/chat/completions", option, body=chat("curl-2", 40, stream=False))
    assert (status, spoken) == (200, version)
    answer = json.loads(out)
    assert answer["choices"][0]["message"]["content"] == said("curl-2", 40)
    assert answer["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize(("option", "version"), VERSIONS.items())
def test_small_routes_and_errors(server: Server, option: str, version: str) -> None:
    assert curl(server, "/health", option) == (200, version, b'{"status":"ok"}')
    assert curl(server, "/health", option, "-I", "-o", "/dev/null")[0] == 200
    assert curl(server, "/nowhere", option)[0] == 404
    status, _, out = curl(server, "/v1/chat/completions", option, body=b"{")
    assert status == 400
    assert json.loads(out)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("option", "version"), VERSIONS.items())
def test_options_about_the_whole_server(server: Server, option: str, version: str) -> None:
    """RFC 9110 9.3.7."""
    head = run(program("curl"), "-sSi", option, "-X", "OPTIONS", "--request-target", "*", server.url).stdout.lower()
    assert head.split()[:2] == [b"http/" + version.encode(), b"204"]
    assert b"\r\nallow: get, head, post, options\r\n" in head


def test_a_target_in_absolute_form(server: Server) -> None:
    """RFC 9112 3.2.2: what curl sends when it takes us for its proxy."""
    assert curl(server, "/health", "--http1.1", "-x", server.url, "--noproxy", "") == (200, "1.1", b'{"status":"ok"}')
    status, _, out = curl(server, "/v1/chat/completions", "-x", server.url, "--noproxy", "", body=chat("proxy", 20))
    assert (status, text_of(out)) == (200, said("proxy", 20))


def test_one_connection_for_many_requests(server: Server) -> None:
    """curl 7.88 cannot do it with --http2-prior-knowledge, whatever the server; see TLS below."""
    done = run(program("curl"), "-sSv", "--http1.1", *[f"{server.url}/health"] * 5)
    assert done.stdout == b'{"status":"ok"}' * 5
    assert done.stderr.count(b"Re-using existing connection") == 4


@pytest.mark.parametrize("option", ["--http1.1", "--http2-prior-knowledge"])
def test_expect_100_continue(server: Server, tmp_path: Path, option: str) -> None:
    """curl waits for a second when no 100 comes; here it comes before the body."""
    body = tmp_path / "body.json"
    body.write_bytes(chat("late", 20) + b" " * BIG)
    done = run(
        program("curl"), "-sSNv", option, "-H", "Expect: 100-continue", "-H", "content-type: application/json",
        "--data-binary", f"@{body}", f"{server.url}/v1/chat/completions",
    )  # fmt: skip
    assert b" 100" in done.stderr
    assert b"Done waiting for 100-continue" not in done.stderr
    assert text_of(done.stdout) == said("late", 20)


def test_a_body_that_is_too_large_is_answered(start_server: Callable[..., Server]) -> None:
    """The answer arrives although the rest of the body is never read (RFC 9112 9.6)."""
    server = start_server("--max-body-bytes", "100000")
    # Over HTTP/2: test_refused_uploads.py.
    for how in ((), ("-H", "Transfer-Encoding: chunked", "-H", "Expect:"), ("-H", "Expect: 100-continue")):
        status, _, out = curl(server, "/v1/chat/completions", "--http1.1", *how, body=b"x" * BIG)
        assert (status, json.loads(out)["error"]["code"]) == (413, "body_too_large"), how
        assert curl(server, "/health", "--http1.1")[0] == 200


@pytest.fixture(scope="module")
def secure() -> Iterator[Server]:
    with server_running("--tls", "self-signed", "--synthetic-step-ms", "0") as it:
        yield it


@pytest.mark.parametrize(("option", "version"), [("--http2", "2"), ("--http1.1", "1.1"), ("--http1.0", "1.1")])
def test_tls(secure: Server, option: str, version: str) -> None:
    assert secure.url.startswith("https://")
    status, spoken, out = curl(secure, "/v1/chat/completions", "-k", option, body=chat("tls", 50))
    assert (status, spoken, text_of(out)) == (200, version, said("tls", 50))
    big = chat("tls", 9) + b" " * BIG
    assert text_of(curl(secure, "/v1/chat/completions", "-k", option, body=big)[2]) == said("tls", 9)


@pytest.mark.parametrize("option", ["--http1.1", "--http2"])
def test_one_tls_connection_for_many_requests(secure: Server, option: str) -> None:
    done = run(program("curl"), "-sSvk", option, *[f"{secure.url}/health"] * 5)
    assert done.stdout == b'{"status":"ok"}' * 5
    assert done.stderr.count(b"Re-using existing connection") == 4


def test_tls_1_2_and_nothing_older(secure: Server) -> None:
    assert curl(secure, "/health", "-k", "--tls-max", "1.2")[:2] == (200, "2")
    with pytest.raises(AssertionError, match="ended with 35"):
        curl(secure, "/health", "-k", "--tls-max", "1.1")


def test_plain_text_to_a_tls_port_hurts_nobody(secure: Server) -> None:
    with pytest.raises(AssertionError, match="ended with"):
        run(program("curl"), "-sS", secure.url.replace("https", "http") + "/health")
    assert curl(secure, "/health", "-k")[0] == 200
