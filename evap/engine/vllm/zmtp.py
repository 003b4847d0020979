"""ZMTP 3.1 with the NULL mechanism, as much as an engine core on this machine needs of it. No I/O.

libzmq gives each message to a thread of its own, which signals ours, which asks it what there is; for a message each
step that is a good part of a token's cost. The wire itself is simple (rfc.zeromq.org/spec/37): a greeting of 64 octets
each way, one READY command each way, then frames: an octet of flags, a length of one octet or eight, the body.

States of a peer: GREETING -> READY -> TRAFFIC. It gets its messages whole; what is not whole is kept.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
#: signature, version 3.1, mechanism, not as a server, filler
GREETING: Final = _SIGNATURE + b"\x03\x01" + _MECHANISM + b"\0" + bytes(31)
_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_KNOWN: Final = _MORE | _LONG | _COMMAND
_EIGHT: Final = struct.Struct(">Q")
_FOUR: Final = struct.Struct(">I")
#: octets of flags and length before a body of more than 255
_LONG_HEAD: Final = 9
#: A frame that claims more is not of an engine.
MOST: Final = 1 << 32


class ZmtpError(Exception):
    """The peer speaks something else."""


class Stage(enum.Enum):
    GREETING = enum.auto()
    READY = enum.auto()
    TRAFFIC = enum.auto()


def head(flags: int, size: int) -> bytes:
    """What stands before a body."""
    return bytes((flags, size)) if size <= 0xFF else bytes((flags | _LONG,)) + _EIGHT.pack(size)


def pieces(message: Sequence[Buffer]) -> list[Buffer]:
    """A message on the wire; joined, these are it."""
    found: list[Buffer] = []
    last = len(message) - 1
    for number, body in enumerate(message):
        size = body.nbytes if isinstance(body, memoryview) else len(body)  # an array's `len` is not its octets
        found += head(_MORE if number < last else 0, size), body
    return found


def command(name: bytes, data: bytes) -> bytes:
    body = bytes((len(name),)) + name + data
    return head(_COMMAND, len(body)) + body


def metadata(**properties: bytes) -> bytes:
    """Of READY; `_` in a name stands for `-`."""
    pairs = ((name.replace("_", "-").encode(), value) for name, value in properties.items())
    return b"".join(bytes((len(name),)) + name + _FOUR.pack(len(value)) + value for name, value in pairs)


def properties(data: bytes) -> dict[bytes, bytes]:
    """The reverse; names in lower case (they are case-insensitive). Raises ZmtpError."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        named = at + 1 + data[at]
        if named + _FOUR.size > len(data):
            raise ZmtpError("READY ends within a property")
        (size,) = _FOUR.unpack_from(data, named)
        begin = named + _FOUR.size
        if begin + size > len(data):
            raise ZmtpError("READY ends within a property")
        found[data[at + 1 : named].lower()] = data[begin : begin + size]
        at = begin + size
    return found


class Peer:
    """The other end of one connection. kind: what we are (ROUTER, PULL); accepts: what it must be (DEALER, PUSH)."""

    def __init__(self, kind: str, accepts: str) -> None:
        self._accepts = accepts.encode()
        self.stage = Stage.GREETING
        self.identity = b""
        #: to be sent
        self.output = GREETING + command(b"READY", metadata(Socket_Type=kind.encode(), Identity=b""))
        self._held = bytearray()  # begins with a frame that is not whole
        self._need = len(GREETING)  # octets of it before anything can be done
        self._parts: list[bytes] = []  # of a message whose last frame has not come

    def take_output(self) -> bytes:
        output, self.output = self.output, b""
        return output

    def receive(self, data: memoryview) -> list[list[bytes]]:
        """Messages that are whole now: lists of bodies. Raises ZmtpError."""
        if self.stage is Stage.TRAFFIC and not self._held and not self._parts:
            size = len(data)  # nearly always it is one message of one frame, and nothing else
            if data[0] == _LONG and size > _LONG_HEAD and _EIGHT.unpack_from(data, 1)[0] == size - _LONG_HEAD:
                return [[bytes(data[_LONG_HEAD:])]]
        self._held += data
        if len(self._held) < self._need:
            return []
        at = 0
        if self.stage is Stage.GREETING:
            at = self._greeting()
        found: list[list[bytes]] = []
        while (frame := self._frame(at)) is not None:
            flags, begin, at = frame
            body = bytes(memoryview(self._held)[begin:at])
            if flags & _COMMAND:
                self._command(body)
            elif self.stage is not Stage.TRAFFIC:
                raise ZmtpError("a message before READY")
            else:
                self._parts.append(body)
                if not flags & _MORE:
                    found.append(self._parts)
                    self._parts = []
        del self._held[:at]
        return found

    def _greeting(self) -> int:
        """Its length."""
        data = self._held
        if data[0] != _SIGNATURE[0] or data[9] != _SIGNATURE[9] or data[10] < GREETING[10]:
            raise ZmtpError("not ZMTP 3")
        if data[12:32] != _MECHANISM:
            raise ZmtpError("not the NULL mechanism")
        self.stage = Stage.READY
        return len(GREETING)

    def _frame(self, at: int) -> tuple[int, int, int] | None:
        """(flags, where the body begins, where it ends) of the frame at `at`; None if it is not whole: sets _need."""
        data = self._held
        there = len(data) - at
        self._need = 2
        if there < self._need:
            return None
        flags = data[at]
        if flags & ~_KNOWN:
            raise ZmtpError(f"a frame with flags {flags:#04x}")
        begin, size = at + 2, data[at + 1]
        if flags & _LONG:
            self._need = _LONG_HEAD
            if there < self._need:
                return None
            begin, size = at + _LONG_HEAD, _EIGHT.unpack_from(data, at + 1)[0]
            if size > MOST:
                raise ZmtpError(f"a frame of {size} octets")
        self._need = begin + size - at
        return (flags, begin, begin + size) if there >= self._need else None

    def _command(self, body: bytes) -> None:
        name, data = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"ERROR":
            raise ZmtpError(f"the peer refuses: {data[1:].decode(errors='replace')}")
        if self.stage is Stage.READY:
            if name != b"READY":
                raise ZmtpError(f"{name!r} where READY was expected")
            given = properties(data)
            if given.get(b"socket-type") != self._accepts:
                raise ZmtpError(f"a peer of type {given.get(b'socket-type')!r}")
            self.identity = given.get(b"identity", b"")
            self.stage = Stage.TRAFFIC
        elif name == b"PING":
            self.output += command(b"PONG", data[2:])  # without its time to live
