"""text/plain: the text, and nothing that is not text."""

from __future__ import annotations

from evap.errors import EngineFailed
from evap.messages import Choice, Usage
from evap.protocol.api.plain import PlainRenderer


def test_only_text() -> None:
    r = PlainRenderer("chatcmpl-x")
    parts = [
        r.prelude(0), r.delta(0, "h\u00e9"), r.delta(0, "\U0001f600\n"), r.tokens([1]), r.finish(0, "stop", "x"),
        r.usage(Usage()), r.error(EngineFailed("x")), r.done(),
    ]  # fmt: skip
    assert b"".join(parts) == "h\u00e9\U0001f600\n".encode()
    assert r.row(0) is None
    assert r.stream_type == r.whole_type == b"text/plain; charset=utf-8"


def test_whole() -> None:
    choice = Choice(index=0, text="\u00e9", finish_reason="stop")
    assert PlainRenderer("x").whole([choice], Usage()) == "\u00e9".encode()
