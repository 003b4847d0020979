"""node: its http2 module, with many streams at once, and its fetch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clients.asking import eventually, node, running, said, text_of
from tests.support import Server


def test_fetch(start_server: Callable[..., Server]) -> None:
    server = start_server("--synthetic-step-ms", "1")
    answer = node("fetch.mjs", server.url)
    assert text_of(answer["streamed"].encode()) == said("fetch", 30)
    assert answer["whole"] == said("fetch", 30)
    eventually(running(server, 0), "the abandoned answer is still being generated")


@pytest.mark.parametrize("step_ms", ["0", "5"])
def test_500_streams_on_10_connections(start_server: Callable[..., Server], step_ms: str) -> None:
    """Each stream has its own text, to the byte; nobody sees another's (litellm issue 35023)."""
    server = start_server("--synthetic-step-ms", step_ms, "--max-running", "512")
    assert node("streams.mjs", server.url, "10", "50", "120") == {"ok": 500, "wrong": []}
    eventually(running(server, 0), "generations are left over")


def test_more_streams_than_may_run(start_server: Callable[..., Server]) -> None:
    """What does not fit into the engine waits; what does not fit into a connection is node's to hold back."""
    server = start_server("--synthetic-step-ms", "0", "--max-running", "8", "--max-concurrent-streams", "100")
    assert node("streams.mjs", server.url, "2", "90", "30") == {"ok": 180, "wrong": []}
