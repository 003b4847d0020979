"""Checks of RFC 9113, section by section: what a server must do with what a client sends. HPACK: sections_hpack.py."""

from __future__ import annotations

from typing import Final

from evap.protocol import headers as code
from tests.conformance.checks import Check, alive, answered, both, check, frame_of, goaway, reset, sizes
from tests.conformance.sections_hpack import HPACK
from tests.protocol import frames as f

PROTOCOL, SIZE, CLOSED, FLOW = code.PROTOCOL_ERROR, code.FRAME_SIZE_ERROR, code.STREAM_CLOSED, code.FLOW_CONTROL_ERROR
TRAILER = ((b"x-trailer", b"1"),)
DEPENDENT = (1).to_bytes(4) + b"\x0f"
ROOT = (0).to_bytes(4) + b"\x0f"
CONT = f.frame(f.CONTINUATION, f.END_HEADERS, 1, f.block(((b"x", b"y"),)))
OPEN = f.headers(1)  # a request whose body has not come
SHUT = f.rst(1)


def head(sid: int, *, flags: int, front: bytes = b"", back: bytes = b"", fields: f.Fields = f.GET) -> bytes:
    return f.frame(f.HEADERS, flags, sid, front + f.block(fields) + back)


def cut(sid: int, parts: int, fields: f.Fields = f.GET) -> bytes:
    """A request in HEADERS and `parts` CONTINUATION frames."""
    whole = f.block(fields)
    step = len(whole) // (parts + 1) + 1
    pieces = [whole[at : at + step] for at in range(0, len(whole), step)]
    frames = [f.frame(f.HEADERS, f.END_STREAM, sid, pieces[0])]
    frames += [f.frame(f.CONTINUATION, 0, sid, piece) for piece in pieces[1:-1]]
    return b"".join([*frames, f.frame(f.CONTINUATION, f.END_HEADERS, sid, pieces[-1])])


def fields_without(name: bytes) -> f.Fields:
    return [field for field in f.GET if field[0] != name]


def request(*fields: tuple[bytes, bytes], base: f.Fields = f.GET) -> bytes:
    return f.headers(1, [*base, *fields], end=True)


LENGTH2 = (*f.POST, (b"content-length", b"2"))

FRAMES: Final = (
    check("9113 3.4", "our SETTINGS come first", frame_of(f.SETTINGS, 0), b""),
    check("9113 3.4", "the client's SETTINGS are acknowledged", frame_of(f.SETTINGS, f.ACK), b""),
    check("9113 4.1", "unknown type", alive, f.frame(0x16, 0, 0, bytes(8))),
    check("9113 4.1", "undefined flags", frame_of(f.PING, f.ACK), f.ping(0x16)),
    check("9113 4.1", "reserved bit", frame_of(f.PING, f.ACK), f.frame(f.PING, 0, 1 << 31, bytes(8))),
    check("9113 4.2", "DATA of 2^14", answered(1), OPEN + f.data(1, bytes(1 << 14), end=True)),
    check("9113 4.2", "DATA over 2^14", goaway(SIZE), OPEN + f.data(1, bytes((1 << 14) + 1), end=True)),
    check("9113 4.2", "HEADERS over 2^14", goaway(SIZE), f.frame(f.HEADERS, 5, 1, bytes((1 << 14) + 1))),
    check("9113 4.3", "a block that cannot be decoded", goaway(code.COMPRESSION_ERROR), f.frame(f.HEADERS, 5, 1, b"@")),
    check("9113 4.3", "PRIORITY in a block", goaway(PROTOCOL), head(1, flags=1) + f.frame(f.PRIORITY, 0, 1, ROOT)),
    check("9113 4.3", "HEADERS of another stream in a block", goaway(PROTOCOL), head(1, flags=1) + f.get(3)),
    check("9113 6.10", "one CONTINUATION", answered(1), cut(1, 1)),
    check("9113 6.10", "several CONTINUATION", answered(1), cut(1, 3)),
    check("9113 6.10", "another frame between", goaway(PROTOCOL), head(1, flags=0) + f.data(1)),
    check("9113 6.10", "on stream 0", goaway(PROTOCOL), head(1, flags=0) + f.frame(f.CONTINUATION, 4, 0, b"")),
    check("9113 6.10", "after END_HEADERS", goaway(PROTOCOL), OPEN + CONT),
    check("9113 6.10", "after a CONTINUATION with END_HEADERS", goaway(PROTOCOL), cut(1, 1) + CONT),
    check("9113 6.10", "after DATA", goaway(PROTOCOL), OPEN + f.data(1, b"x") + CONT),
)
STATES: Final = (
    check("9113 5.1", "idle: DATA", goaway(PROTOCOL), f.data(1, b"x")),
    check("9113 5.1", "idle: RST_STREAM", goaway(PROTOCOL), f.rst(1)),
    check("9113 5.1", "idle: WINDOW_UPDATE", goaway(PROTOCOL), f.window(1, 100)),
    check("9113 5.1", "idle: CONTINUATION", goaway(PROTOCOL), CONT),
    check("9113 5.1", "idle: PRIORITY", alive, f.frame(f.PRIORITY, 0, 1, ROOT)),
    check("9113 5.1", "half-closed: DATA", reset(1, CLOSED), f.get(1) + f.data(1, b"x")),
    check("9113 5.1", "half-closed: HEADERS", reset(1, CLOSED), f.get(1) + f.get(1)),
    check("9113 5.1", "half-closed: CONTINUATION", goaway(PROTOCOL, CLOSED), f.get(1) + CONT),
    check("9113 5.1", "half-closed: WINDOW_UPDATE", answered(1), f.get(1) + f.window(1, 100)),
    check("9113 5.1", "half-closed: PRIORITY", answered(1), f.get(1) + f.frame(f.PRIORITY, 0, 1, ROOT)),
    check("9113 5.1", "half-closed: RST_STREAM", alive, f.get(1) + f.rst(1)),
    check("9113 5.1", "reset: DATA", reset(1, CLOSED), OPEN + SHUT, f.data(1, b"x")),
    check("9113 5.1", "reset: HEADERS", reset(1, CLOSED), OPEN + SHUT, f.get(1)),
    check("9113 5.1", "reset: CONTINUATION", goaway(PROTOCOL, CLOSED), OPEN + SHUT, CONT),
    check("9113 5.1", "reset: PRIORITY, WINDOW_UPDATE, RST_STREAM", alive, OPEN + SHUT,
          f.frame(f.PRIORITY, 0, 1, ROOT) + f.window(1, 1) + f.rst(1)),
    check("9113 5.1", "closed: DATA", reset(1, CLOSED), f.get(1), f.data(1, b"x")),
    check("9113 5.1", "closed: HEADERS", goaway(CLOSED), f.get(1), f.get(1)),
    check("9113 5.1", "closed: CONTINUATION", goaway(PROTOCOL, CLOSED), f.get(1), CONT),
    check("9113 5.1", "closed: PRIORITY", answered(1), f.get(1), f.frame(f.PRIORITY, 0, 1, ROOT)),
    check("9113 5.1.1", "even id", goaway(PROTOCOL), f.get(2)),
    check("9113 5.1.1", "lower id", goaway(PROTOCOL, CLOSED), f.get(5) + f.get(3)),
    check("9113 5.1.2", "more streams than allowed", reset(33, code.REFUSED_STREAM),
          b"".join(f.headers(sid) for sid in range(1, 35, 2))),
    check("9113 5.3", "HEADERS that depends on itself", answered(1), head(1, flags=0x25, front=DEPENDENT)),
    check("9113 5.3", "PRIORITY that depends on itself", alive, f.frame(f.PRIORITY, 0, 1, DEPENDENT)),
    check("9113 5.3", "PRIORITY on an idle stream, then a lower one opens", answered(1),
          f.frame(f.PRIORITY, 0, 5, ROOT) + f.get(1)),
    check("9113 5.4.1", "the connection closes after an error", goaway(SIZE), f.frame(f.PING, 0, 0, b"")),
    check("9113 5.4.1", "GOAWAY names the last stream",
          both(goaway(SIZE), lambda out: any(o.type == f.GOAWAY and o.number == 1 for o in out)),
          f.get(1) + f.frame(f.PING, 0, 0, b"")),
    check("9113 5.5", "unknown frame", alive, f.frame(0xFE, 0, 0, b"x")),
    check("9113 5.5", "unknown frame in a block", goaway(PROTOCOL), head(1, flags=1) + f.frame(0xFE, 0, 1, b"x")),
)  # fmt: skip
KINDS: Final = (
    check("9113 6.1", "DATA", answered(1), f.post(1, b"body")),
    check("9113 6.1", "several DATA", answered(1), OPEN + f.data(1, b"a") * 3 + f.data(1, b"z", end=True)),
    check("9113 6.1", "padded", answered(1), OPEN + f.frame(f.DATA, f.PADDED | 1, 1, b"\x05x" + bytes(5))),
    check("9113 6.1", "on stream 0", goaway(PROTOCOL), f.data(0, b"x")),
    check("9113 6.1", "on a stream that is not open", reset(1, CLOSED), f.get(1), f.data(1, b"x", end=True)),
    check("9113 6.1", "bad padding", goaway(PROTOCOL), OPEN + f.frame(f.DATA, f.PADDED | 1, 1, b"\x06x")),
    check("9113 6.2", "HEADERS", answered(1), f.get(1)),
    check("9113 6.2", "padded", answered(1), head(1, flags=0xD, front=b"\x02", back=bytes(2))),
    check("9113 6.2", "with priority", answered(1), head(1, flags=0x25, front=ROOT)),
    check("9113 6.2", "padded, with priority", answered(1), head(1, flags=0x2D, front=b"\x02" + ROOT, back=bytes(2))),
    check("9113 6.2", "cut short by PRIORITY", goaway(PROTOCOL), head(1, flags=1) + f.frame(f.PRIORITY, 0, 3, ROOT)),
    check("9113 6.2", "on stream 0", goaway(PROTOCOL), f.get(0)),
    check("9113 6.2", "bad padding", goaway(PROTOCOL), head(1, flags=0xD, front=b"\xff")),
    check("9113 6.3", "weights 1 and 256", alive,
          f.frame(f.PRIORITY, 0, 1, bytes(5)) + f.frame(f.PRIORITY, 0, 1, bytes(4) + b"\xff")),
    check("9113 6.3", "exclusive dependency", alive, f.frame(f.PRIORITY, 0, 3, (1 << 31 | 1).to_bytes(4) + b"\x01")),
    check("9113 6.3", "PRIORITY on stream 0", goaway(PROTOCOL), f.frame(f.PRIORITY, 0, 0, ROOT)),
    check("9113 6.3", "PRIORITY of length 4", goaway(SIZE), OPEN + f.frame(f.PRIORITY, 0, 1, bytes(4))),
    check("9113 6.4", "RST_STREAM", alive, OPEN + f.rst(1)),
    check("9113 6.4", "on stream 0", goaway(PROTOCOL), f.rst(0)),
    check("9113 6.4", "on an idle stream", goaway(PROTOCOL), f.rst(1)),
    check("9113 6.4", "of length 3", goaway(SIZE), OPEN + f.frame(f.RST_STREAM, 0, 1, bytes(3))),
    check("9113 6.5", "SETTINGS", alive, f.settings((3, 10))),
    check("9113 6.5", "ACK with payload", goaway(SIZE), f.frame(f.SETTINGS, f.ACK, 0, bytes(1))),
    check("9113 6.5", "on a stream", goaway(PROTOCOL), f.frame(f.SETTINGS, 0, 1, b"")),
    check("9113 6.5", "length not of sixes", goaway(SIZE), f.frame(f.SETTINGS, 0, 0, bytes(3))),
    check("9113 6.5.2", "ENABLE_PUSH=2", goaway(PROTOCOL), f.settings((2, 2))),
    check("9113 6.5.2", "INITIAL_WINDOW_SIZE=2^31", goaway(FLOW), f.settings((4, 1 << 31))),
    check("9113 6.5.2", "MAX_FRAME_SIZE below 2^14", goaway(PROTOCOL), f.settings((5, 16_383))),
    check("9113 6.5.2", "MAX_FRAME_SIZE above 2^24-1", goaway(PROTOCOL), f.settings((5, 1 << 24))),
    check("9113 6.5.2", "unknown setting", alive, f.settings((0xFF, 1))),
    check("9113 6.5.3", "of two values of one setting the last holds", sizes(1, 1),
          f.settings((4, 100), (4, 1)), f.get(1)),
    check("9113 6.5.3", "each SETTINGS is acknowledged",
          lambda out: sum(o.type == f.SETTINGS and o.flags & 1 for o in out) == 3, f.settings(), f.settings()),
    check("9113 6.6", "PUSH_PROMISE from a client", goaway(PROTOCOL),
          f.get(1) + f.frame(f.PUSH_PROMISE, 4, 1, (2).to_bytes(4) + f.block(f.GET))),
    check("9113 6.7", "PING is answered with the same octets",
          lambda out: any(o.type == f.PING and o.flags == f.ACK and o.payload == b"8 octets" for o in out), f.ping()),
    check("9113 6.7", "PING ACK is not answered",
          both(alive, lambda out: not any(o.payload == b"8 octets" for o in out)), f.ping(f.ACK)),
    check("9113 6.7", "on a stream", goaway(PROTOCOL), f.frame(f.PING, 0, 1, bytes(8))),
    check("9113 6.7", "of length 6", goaway(SIZE), f.frame(f.PING, 0, 0, bytes(6))),
    check("9113 6.8", "GOAWAY while a stream runs", both(sizes(1, 5), goaway(0)), f.get(1) + f.goaway()),
    check("9113 6.8", "on a stream", goaway(PROTOCOL), f.frame(f.GOAWAY, 0, 1, bytes(8))),
    check("9113 7", "GOAWAY with an unknown code", goaway(0), f.goaway(code=0xFF)),
    check("9113 7", "RST_STREAM with an unknown code", alive, OPEN + f.rst(1, 0xFF)),
)  # fmt: skip
WINDOWS: Final = (
    check("9113 6.9", "WINDOW_UPDATE of the connection", alive, f.window(0, 100)),
    check("9113 6.9", "WINDOW_UPDATE of a stream", answered(1), OPEN + f.window(1, 100) + f.data(1, b"x", end=True)),
    check("9113 6.9", "increment 0 on the connection", goaway(PROTOCOL), f.window(0, 0)),
    check("9113 6.9", "increment 0 on a stream", goaway(PROTOCOL), OPEN + f.window(1, 0)),
    check("9113 6.9", "of length 3", goaway(SIZE), f.frame(f.WINDOW_UPDATE, 0, 0, bytes(3))),
    check("9113 6.9.1", "a window of 1", sizes(1, 1), f.get(1), settings=[(4, 1)]),
    check("9113 6.9.1", "connection past 2^31-1", goaway(FLOW), f.window(0, (1 << 31) - 1) * 2),
    check("9113 6.9.1", "stream past 2^31-1", reset(1, FLOW), OPEN + f.window(1, (1 << 31) - 1)),
    check("9113 6.9.2", "a window opened by SETTINGS", sizes(1, 1, 4), f.get(1), f.settings((4, 1)), f.settings((4, 9)),
          settings=[(4, 0)]),
    check("9113 6.9.2", "a negative window waits", sizes(1, 3, 1), f.get(1), f.settings((4, 2)), f.window(1, 2),
          settings=[(4, 3)]),
    check("9113 6.9.2", "INITIAL_WINDOW_SIZE that overflows a stream", goaway(FLOW),
          OPEN + f.window(1, (1 << 31) - 1 - 65_535) + f.settings((4, 65_536))),
)  # fmt: skip
MESSAGES: Final = (
    check("9113 8.1", "GET", answered(1), f.get(1)),
    check("9113 8.1", "HEAD", answered(1), f.headers(1, [(b":method", b"HEAD"), *f.GET[1:]], end=True)),
    check("9113 8.1", "POST", answered(1), f.post(1, b"x")),
    check("9113 8.1", "POST with trailers", answered(1), OPEN + f.data(1, b"x") + f.headers(1, TRAILER, end=True)),
    check("9113 8.1", "trailers without END_STREAM", reset(1, PROTOCOL),
          OPEN + f.data(1, b"x") + f.headers(1, TRAILER)),
    check("9113 8.1.1", "content-length that is not DATA's", reset(1, PROTOCOL),
          f.headers(1, LENGTH2) + f.data(1, b"x", end=True)),
    check("9113 8.1.1", "content-length that is not that of several DATA", reset(1, PROTOCOL),
          f.headers(1, LENGTH2) + f.data(1, b"x") * 2 + f.data(1, b"x", end=True)),
    check("9113 8.2.1", "upper case in a name", reset(1, PROTOCOL), request((b"X-Upper", b"v"))),
    check("9113 8.2.1", "LF in a value", reset(1, PROTOCOL), request((b"x", b"a\nb"))),
    check("9113 8.2.2", "connection", reset(1, PROTOCOL), request((b"connection", b"keep-alive"))),
    check("9113 8.2.2", "te other than trailers", reset(1, PROTOCOL), request((b"te", b"trailers, deflate"))),
    check("9113 8.3", "unknown pseudo-field", reset(1, PROTOCOL), request((b":test", b"ok"))),
    check("9113 8.3", "pseudo-field of a response", reset(1, PROTOCOL), request((b":status", b"200"))),
    check("9113 8.3", "pseudo-field as trailer", reset(1, PROTOCOL), OPEN + f.headers(1, f.GET[:1], end=True)),
    check("9113 8.3", "pseudo-field after a field", reset(1, PROTOCOL), request(*f.GET, base=((b"x", b"y"),))),
    check("9113 8.3.1", "empty :path", reset(1, PROTOCOL), request((b":path", b""), base=f.GET[:3])),
    *(check("9113 8.3.1", f"no {name.decode()}", reset(1, PROTOCOL), request(base=fields_without(name)))
      for name in (b":method", b":scheme", b":path")),
    *(check("9113 8.3.1", f"{name.decode()} twice", reset(1, PROTOCOL), request((name, value)))
      for name, value in (f.GET[0], f.GET[1], f.GET[3])),
    check("9113 8.3.1", "host that is not :authority", reset(1, PROTOCOL), request((b"host", b"other"))),
    check("9113 8.4", "a client cannot push", goaway(PROTOCOL),
          OPEN + f.frame(f.PUSH_PROMISE, 4, 1, (2).to_bytes(4) + f.block(f.GET))),
)  # fmt: skip

SECTIONS: Final[tuple[Check, ...]] = (*FRAMES, *STATES, *KINDS, *WINDOWS, *MESSAGES, *HPACK)
