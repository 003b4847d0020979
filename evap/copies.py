"""Blocks of a push that another process of this server keeps: they are fetched from it, in pieces, when asked for here.

The id in a path says who made it. What was fetched is kept for as long as the original, so that a block is fetched
once; requests that come meanwhile wait for it. While the original still grows, it is asked for again and again.

    asker                                   maker, by way of the parent
    piece of PATH for KEY from octet 0 ->   b"" (no such block, or another key's), or a Piece
    ... from octet PIECE_BYTES ->           the next Piece, or b"" (it had to make room)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from evap.blocks import Answer, Block, BlockStore, missing
from evap.errors import Overloaded
from evap.protocol.events import Reply
from evap.siblings import NOBODY, Siblings

#: In one packet, see `between.py`.
PIECE_BYTES: Final = 128 << 10
#: Until a block that still grows is asked for again.
AGAIN_S: Final = 0.25

Later = Callable[[float, Callable[[], None]], object]


class Piece(msgspec.Struct, array_like=True):
    """size: of the whole block; -1: it still grows, and nothing is said of it. left_ns: it is kept for so long."""

    size: int
    left_ns: int = 0
    data: bytes = b""


class _Wanted(msgspec.Struct, array_like=True):
    path: str
    key: str
    offset: int


_encode: Final = msgspec.json.Encoder().encode
_pack: Final = msgspec.msgpack.Encoder().encode
_read_wanted: Final = msgspec.json.Decoder(_Wanted).decode
_read_piece: Final = msgspec.msgpack.Decoder(Piece).decode


def answer(store: BlockStore, about: str) -> bytes:
    """What the maker says: a piece of one of its blocks, or b""."""
    wanted = _read_wanted(about)
    block = store.find(wanted.path, wanted.key)
    if block is None:
        return b""
    if not block.complete:
        return _pack(Piece(-1))
    data = block.body[wanted.offset : wanted.offset + PIECE_BYTES]
    return _pack(Piece(len(block.body), store.left_ns(block), data))


class Copies:
    """store: what is kept here. later: call after so many seconds."""

    def __init__(self, store: BlockStore, siblings: Siblings, later: Later) -> None:
        self._store, self._siblings, self._later = store, siblings, later

    def fetch(self, path: str, key: str, reply: Reply, answer: Answer) -> None:
        """As BlockStore.fetch, whoever of us keeps it. Raises NotFound."""
        maker = self._siblings.who_made(path.split("/")[-3])
        if maker == NOBODY:
            self._store.fetch(path, key, reply, answer)
            return
        place = f"{path} {key}"  # two keys that ask for the same path do not meet
        copy = self._store.find(place, key)
        if copy is None:
            copy = self._store.open_copy(place, key)
            copy.ask(reply, answer)
            self._ask(copy, maker, path, [], 0)
        else:
            copy.ask(reply, answer)

    def _ask(self, copy: Block, maker: int, path: str, parts: list[bytes], have: int) -> None:
        if not copy.wanted:
            self._store.drop(copy)
            return
        about = _encode(_Wanted(path, copy.key, have)).decode()
        self._siblings.ask("block", about, partial(self._heard, copy, maker, path, parts, have), maker)

    def _heard(self, copy: Block, maker: int, path: str, parts: list[bytes], have: int, data: bytes) -> None:
        """parts: what has come before, `have` octets."""
        if not data:
            self._store.drop(copy, missing(path))
            return
        piece = _read_piece(data)
        if piece.size < 0:
            self._later(AGAIN_S, partial(self._ask, copy, maker, path, [], 0))
        elif not parts and not self._store.lend(copy, piece.size):
            full = Overloaded("too many blocks of other processes are kept here; try again later", retry_after_s=1)
            self._store.drop(copy, full)
        else:
            parts.append(piece.data)
            have += len(piece.data)
            if have < piece.size:
                self._ask(copy, maker, path, parts, have)
            else:
                self._store.keep_copy(copy, piece.left_ns, b"".join(parts))
