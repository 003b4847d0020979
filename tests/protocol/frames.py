"""Frames, legal and illegal, as bytes: what a well-behaved client library would never send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hpack import Encoder

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ALTSVC, ORIGIN, PRIORITY_UPDATE = 0xA, 0xC, 0x10
END_STREAM, ACK, END_HEADERS, PADDED, PRIO = 0x1, 0x1, 0x4, 0x8, 0x20

Fields = Sequence[tuple[bytes, bytes]]
POST: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"node:8000"),
    (b":path", b"/v1/chat/completions"),
)
GET: Final = ((b":method", b"GET"), *POST[1:3], (b":path", b"/health"))


def frame(kind: int, flags: int, sid: int, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """`length` lies about the payload."""
    size = len(payload) if length is None else length
    return size.to_bytes(3) + bytes((kind, flags)) + sid.to_bytes(4) + payload


def settings(*entries: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(i.to_bytes(2) + v.to_bytes(4) for i, v in entries))


def settings_ack() -> bytes:
    return frame(SETTINGS, ACK, 0)


def hello(*entries: tuple[int, int]) -> bytes:
    """Preface, SETTINGS, and the acknowledgement of ours."""
    return PREFACE + settings(*entries) + settings_ack()


def block(fields: Fields) -> bytes:
    """A header block without dynamic table entries: usable at any point of any connection."""
    return Encoder().encode([(name, value, True) for name, value in fields])


def headers(sid: int, fields: Fields = POST, *, end: bool = False, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags | (END_STREAM if end else 0), sid, block(fields))


def get(sid: int, *more: tuple[bytes, bytes]) -> bytes:
    return headers(sid, (*GET, *more), end=True)


def post(sid: int, body: bytes = b"{}", *more: tuple[bytes, bytes]) -> bytes:
    return headers(sid, (*POST, *more)) + data(sid, body, end=True)


def data(sid: int, payload: bytes = b"", *, end: bool = False) -> bytes:
    return frame(DATA, END_STREAM if end else 0, sid, payload)


def rst(sid: int, code: int = 8) -> bytes:
    return frame(RST_STREAM, 0, sid, code.to_bytes(4))


def window(sid: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, sid, increment.to_bytes(4))


def ping(flags: int = 0) -> bytes:
    return frame(PING, flags, 0, b"8 octets")


def goaway(last: int = 0, code: int = 0) -> bytes:
    return frame(GOAWAY, 0, 0, last.to_bytes(4) + code.to_bytes(4))


def priority_update(sid: int, value: bytes, *, on: int = 0) -> bytes:
    return frame(PRIORITY_UPDATE, 0, on, sid.to_bytes(4) + value)
