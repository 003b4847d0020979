"""An HTTP/1.1 core with a transport that takes what it is told to, and h11 as the eye of the client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import h11

from evap.config import ProtocolConfig
from evap.protocol.events import Event, RequestReady, StreamCancelled
from evap.protocol.http1 import Http1Core
from evap.protocol.http1_reply import Http1Reply
from evap.protocol.limits import NS, Shared

CONFIG = ProtocolConfig()
GET = b"GET /health HTTP/1.1\r\nHost: evap.test\r\n\r\n"
JSON = ((b"content-type", b"application/json"),)
SSE = ((b"content-type", b"text/event-stream"),)


def post(body: bytes, *fields: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST /v1/completions HTTP/" + version, b"Host: evap.test", b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Wire:
    """A core with a transport that takes everything (`room` bytes, if set) and a clock that moves when told to."""

    def __init__(self, **options: Any) -> None:
        self.shared = Shared()
        self.now = 10**18
        self.core = Http1Core(replace(CONFIG, **options), peer="127.0.0.1:1", shared=self.shared, now_ns=self.now)
        self.sent = b""
        self.held = 0
        self.events: list[Event] = []

    def receive(self, data: bytes) -> list[Event]:
        return self._note(self.core.receive(data, self.now))

    def request(self, data: bytes = GET) -> Http1Reply:
        self.receive(data)
        return self.reply()

    def reply(self) -> Http1Reply:
        """Of the newest request."""
        reply = [e for e in self.events if isinstance(e, RequestReady)][-1].reply
        assert isinstance(reply, Http1Reply)
        return reply

    def flush(self, room: int | None = None) -> bytes:
        """Write; the peer takes `room` bytes of all that is outstanding, or everything."""
        data = b"".join(bytes(part) for part in self.core.take_output())
        self.sent += data
        outstanding = self.held + len(data)
        self.held = outstanding - (outstanding if room is None else min(room, outstanding))
        self._note(self.core.written(self.held, self.now))
        return data

    def pass_s(self, seconds: float) -> list[Event]:
        self.now += int(seconds * NS)
        return self._note(self.core.tick(self.now))

    def eof(self) -> list[Event]:
        return self._note(self.core.eof(self.now))

    def _note(self, events: list[Event]) -> list[Event]:
        self.events += events
        return events

    @property
    def cancelled(self) -> list[str]:
        return [e.reason for e in self.events if isinstance(e, StreamCancelled)]

    @property
    def requests(self) -> list[RequestReady]:
        return [e for e in self.events if isinstance(e, RequestReady)]


def read(data: bytes, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """One response as h11 understands it; it must be the only thing in `data`."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    status, headers, body = 0, {}, b""
    while True:
        event = client.next_event()
        if isinstance(event, h11.Response):
            status, headers = event.status_code, {n.decode(): v.decode() for n, v in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert client.trailing_data[0] == b""
            return status, headers, body
        elif event is h11.NEED_DATA:
            client.receive_data(b"")  # only the end of the connection ends such a body


def status_of(wire: Wire) -> tuple[int, str]:
    wire.flush()
    status, _, body = read(wire.sent)
    return status, json.loads(body)["error"]["code"]
