"""An HTTP/2 client that counts for itself: every DATA frame of every stream, also after it has reset the stream.

Blocking, one connection, many streams. What a library would drop (DATA on a stream that was reset) is counted here:
the server handed it over.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import hpack

_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WIDE: Final = (1 << 31) - 1 - 65_535


@dataclass
class Stream:
    """One request as its client saw it. on_event: called with each SSE event; True resets the stream."""

    kind: str
    id: str = ""
    status: int = 0
    body: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    chars: int = 0  #: of text: tokens are one character each
    reason: str = ""  #: finish_reason of the last choice that ended
    stopped: str = ""  #: the stop string that matched
    usage: dict[str, Any] | None = None
    ended: bool = False
    reset: bool = False
    on_event: Callable[[Stream], bool] = lambda stream: False
    rest: bytes = b""

    def feed(self, data: bytes) -> bool:
        """Take body bytes; True if the client has seen enough."""
        self.body += data
        if not self.streamed:
            return False
        *events, self.rest = (self.rest + data).split(b"\n\n")
        enough = False
        for event in events:
            if event.startswith(b"data: {"):
                self._event(json.loads(event[6:]))
                enough = self.on_event(self) or enough
        return enough

    def _event(self, event: dict[str, Any]) -> None:
        self.id = event.get("id", self.id)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.chars += len(choice["delta"].get("content") or "")
            self.reason = choice["finish_reason"] or self.reason
            if isinstance(choice.get("stop_reason"), str) and self.reason == "stop":
                self.stopped = choice["stop_reason"]

    @property
    def streamed(self) -> bool:
        return self.status == 200 and not self.body.startswith(b'{"id"')


class WireClient:
    """Raises ConnectionError when the server goes away. Its windows are as wide as they can be, and never updated."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self._in, self._out = hpack.Decoder(), hpack.Encoder()
        self._data = b""
        self._next = 1
        self.streams: dict[int, Stream] = {}
        settings = (4).to_bytes(2, "big") + ((1 << 31) - 1).to_bytes(4, "big")
        self._socket.sendall(
            _PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, _WIDE.to_bytes(4, "big"))
        )

    def ask(self, stream: Stream, body: dict[str, Any], key: str) -> None:
        data = json.dumps(body).encode()
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", "/v1/chat/completions"), (":authority", "x"),
            ("content-type", "application/json"), ("authorization", f"Bearer {key}"), ("te", "trailers"),
        ]  # fmt: skip
        number, self._next = self._next, self._next + 2
        self.streams[number] = stream
        self._socket.sendall(_frame(_HEADERS, 4, number, self._out.encode(fields)) + _frame(_DATA, 1, number, data))

    @property
    def open(self) -> int:
        return sum(not (s.ended or s.reset) for s in self.streams.values())

    def run(self, until: Callable[[], bool]) -> None:
        """Read until `until()`."""
        while not until():
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._take(data)

    def _take(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= 9:
            length = int.from_bytes(self._data[:3], "big")
            if len(self._data) < 9 + length:
                return
            kind, flags = self._data[3], self._data[4]
            number = int.from_bytes(self._data[5:9], "big")
            payload, self._data = self._data[9 : 9 + length], self._data[9 + length :]
            self._frame(kind, flags, number, payload)

    def settle(self) -> None:
        """Read what the kernel still brings of a server that is stopped: until nothing has come for a while."""
        while select.select([self._socket], [], [], 0.5)[0]:
            self._take(self._socket.recv(1 << 16))

    def ping(self) -> None:
        """Return when everything that the server had sent before it read this has arrived."""
        self._pinged = False
        self._socket.sendall(_frame(_PING, 0, 0, b"12345678"))
        self.run(lambda: self._pinged)

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & 1:
            self._socket.sendall(_frame(_SETTINGS, 1, 0, b""))
        elif kind == _PING:
            self._pinged = bool(flags & 1)
        elif kind == _HEADERS:
            fields = {str(name): str(value) for name, value in self._in.decode(payload)}
            stream = self.streams[number]
            if ":status" in fields:
                stream.status = int(fields[":status"])
            else:
                stream.trailers = fields
        elif kind == _DATA:
            stream = self.streams[number]
            if stream.feed(payload) and not stream.reset and not flags & 1:
                stream.reset = True
                self._socket.sendall(_frame(_RST, 0, number, (8).to_bytes(4, "big")))
        elif kind == _RST:
            self.streams[number].ended = True
        if kind in (_HEADERS, _DATA) and flags & 1:
            self.streams[number].ended = True

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
