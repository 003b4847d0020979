"""`Accept: text/plain`: the text and nothing else, as UTF-8, for `curl` and for pipes.

There is nowhere to put a finish_reason, usage or an error: a stream that fails is broken off (RST_STREAM, or an
HTTP/1.1 body without its last chunk), so that a client cannot take it for complete. Its token counts are in the usage
ledger under `id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from evap.errors import EvapError
from evap.messages import Choice, LogprobText, Usage

PLAIN_TYPE: Final = b"text/plain; charset=utf-8"


class BareRenderer:
    """Says nothing at all: what a form without frames around the content has in common."""

    kind = ""
    stream_type = b""
    whole_type = b""
    __slots__ = ("id",)

    def __init__(self, id: str) -> None:
        self.id = id

    def prelude(self, index: int, usage: Usage | None = None) -> bytes:
        return b""

    def row(self, index: int) -> tuple[bytes, bytes] | None:
        return None

    def delta(
        self, index: int, text: str, logprobs: Sequence[LogprobText] | None = None, usage: Usage | None = None
    ) -> bytes:
        return b""

    def tokens(self, ids: Sequence[int]) -> bytes:
        return b""

    def finish(
        self, index: int, reason: str, stop_reason: str | int | None = None, usage: Usage | None = None
    ) -> bytes:
        return b""

    def usage(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: EvapError) -> bytes:
        """Empty: the caller aborts the reply instead."""
        return b""

    def done(self) -> bytes:
        return b""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return b""


class PlainRenderer(BareRenderer):
    """Raw text. Never takes rows: text without quotes has no filler that a client would not see."""

    kind = "text"
    stream_type = PLAIN_TYPE
    whole_type = PLAIN_TYPE
    __slots__ = ()

    def delta(
        self, index: int, text: str, logprobs: Sequence[LogprobText] | None = None, usage: Usage | None = None
    ) -> bytes:
        return text.encode()

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return "".join(c.text for c in choices).encode()
