"""What a check of one section is: frames in one or more portions, and what must come back for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpack import Decoder

from tests.protocol import frames as f
from tests.protocol.joined import Out

Condition = Callable[[Sequence[Out]], bool]


class Check(NamedTuple):
    """`send`: each portion but the last is followed by a PING whose answer is waited for."""

    section: str
    what: str
    expect: Condition
    send: tuple[bytes, ...]
    settings: tuple[tuple[int, int], ...] = ()


def check(section: str, what: str, expect: Condition, *send: bytes, settings: Sequence[tuple[int, int]] = ()) -> Check:
    return Check(f"RFC {section}", what, expect, send, tuple(settings))


def goaway(*codes: int) -> Condition:
    """The connection ends, with one of these codes."""
    return lambda out: any(o.type == f.GOAWAY and int.from_bytes(o.payload[4:8]) in codes for o in out)


def reset(sid: int, *codes: int) -> Condition:
    """The stream ends; the connection lives: our PING after it is answered."""
    return lambda out: (
        any(o.type == f.RST_STREAM and o.sid == sid and o.number in codes for o in out)
        and alive(out)
        and not any(o.type == f.GOAWAY for o in out)
    )


def alive(out: Sequence[Out]) -> bool:
    """The PING at the end is answered, and nothing was said against anything."""
    return any(o.type == f.PING and o.flags & f.ACK and o.payload == b"the end " for o in out)


def answered(*sids: int, status: int = 200) -> Condition:
    """These streams get a complete response, and the connection lives."""

    def holds(out: Sequence[Out]) -> bool:
        ended = {o.sid for o in out if o.type in (f.DATA, f.HEADERS) and o.flags & f.END_STREAM}
        heads = [o for o in out if o.type == f.HEADERS and o.sid in sids]
        right = [o.sid for o in heads if _status(o) == status]
        return ended >= set(sids) <= set(right) and alive(out)

    return holds


def _status(head: Out) -> int:
    return int(dict(Decoder().decode(head.payload.removeprefix(b"\x20"), raw=True))[b":status"])


def sizes(sid: int, *expected: int) -> Condition:
    """The DATA frames of the stream begin with these lengths."""
    return lambda out: (
        [len(o.payload) for o in out if o.type == f.DATA and o.sid == sid][: len(expected)] == list(expected)
    )


def frame_of(kind: int, flags: int, sid: int = 0) -> Condition:
    return lambda out: any(o.type == kind and o.flags & flags == flags and o.sid == sid for o in out)


def both(*conditions: Condition) -> Condition:
    return lambda out: all(condition(out) for condition in conditions)
