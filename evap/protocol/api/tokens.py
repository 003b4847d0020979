"""`Accept: application/vnd.evap.tokens`: token ids as little-endian unsigned 32-bit integers, back to back.

For programs that have the tokenizer: four bytes a token, no text on either side. The end token, if any, is not part of
it. Like plain text it cannot carry an error: a stream that fails is broken off.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from evap.protocol.api.plain import BareRenderer

TOKENS_TYPE: Final = b"application/vnd.evap.tokens"


class TokensRenderer(BareRenderer):
    """Token ids. A row is its four bytes: prefix and tail are empty.

    `whole` is not reachable: `renderer_for` refuses tokens without a stream, for a Choice has no ids.
    """

    kind = "tokens"
    stream_type = TOKENS_TYPE
    whole_type = TOKENS_TYPE
    __slots__ = ()

    def row(self, index: int) -> tuple[bytes, bytes] | None:
        return b"", b""

    def tokens(self, ids: Sequence[int]) -> bytes:
        return struct.pack(f"<{len(ids)}I", *ids)
