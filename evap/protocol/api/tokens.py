"""`Accept: application/vnd.evap.tokens`: token ids as little-endian unsigned 32-bit integers, back to back.

For programs that have the tokenizer: four bytes a token, no text on either side. The end token, if any, is not part of
it. Like plain text it cannot carry an error: a stream that fails is broken off.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from evap.errors import EvapError
from evap.messages import Choice, LogprobText, Usage

TOKENS_TYPE: Final = b"application/vnd.evap.tokens"


class TokensRenderer:
    """Token ids. A row is its four bytes: prefix and tail are empty."""

    kind = "tokens"
    stream_type = TOKENS_TYPE
    whole_type = TOKENS_TYPE
    __slots__ = ("id",)

    def __init__(self, id: str) -> None:
        self.id = id

    def prelude(self, index: int, usage: Usage | None = None) -> bytes:
        return b""

    def row(self, index: int) -> tuple[bytes, bytes] | None:
        return b"", b""

    def delta(
        self, index: int, text: str, logprobs: Sequence[LogprobText] | None = None, usage: Usage | None = None
    ) -> bytes:
        return b""

    def tokens(self, ids: Sequence[int]) -> bytes:
        return struct.pack(f"<{len(ids)}I", *ids)

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
        """Not reachable: `renderer_for` refuses tokens without a stream, for a Choice has no ids."""
        return b""
