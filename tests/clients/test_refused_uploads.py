"""A request that is refused before its body is here: every client gets the answer (RFC 9113 8.1, RFC 9112 9.6)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.clients.asking import SOON_S, gauge, node, program, run
from tests.support import Server, running

LIMIT = 8 << 20
WRONG = [(16 << 20, "/v1/chat/completions", 413, "body_too_large"), (LIMIT, "/v1/nothing", 404, "not_found")]


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    with running("--max-body-bytes", str(LIMIT), "--synthetic-step-ms", "0") as it:
        yield it


@pytest.mark.parametrize(("size", "path", "status", "code"), WRONG)
@pytest.mark.parametrize("option", ["--http1.1", "--http2-prior-knowledge"])
@pytest.mark.parametrize("how", [[], ["-H", "Transfer-Encoding: chunked"], ["-H", "Expect:"]], ids=" ".join)
def test_curl(small: Server, option: str, how: list[str], size: int, path: str, status: int, code: str) -> None:
    """curl 7.88 loses the answer (exit 92) if RST_STREAM comes with it."""
    command = [program("curl"), "-sS", option, *how, "-H", "content-type: application/json", "--data-binary", "@-"]
    out = run(*command, "-w", "\n%{http_code}", small.url + path, input=bytes(size)).stdout
    answer, _, said = out.rpartition(b"\n")
    assert (int(said), json.loads(answer)["error"]["code"]) == (status, code)


@pytest.mark.parametrize(("size", "path", "status", "code"), WRONG)
@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_httpx(small: Server, http2: bool, size: int, path: str, status: int, code: str) -> None:
    """It sends all of its body before it reads."""
    with httpx.Client(base_url=small.url, timeout=SOON_S, http1=not http2, http2=http2) as client:
        answer = client.post(path, content=bytes(size), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(("size", "path", "status", "code"), WRONG)
def test_node(small: Server, size: int, path: str, status: int, code: str) -> None:
    assert node("refused.mjs", small.url, path, str(size)) == [[status, code]] * 2


def test_nothing_of_them_is_kept(small: Server) -> None:
    assert gauge(small, "evap_body_bytes") == 0
