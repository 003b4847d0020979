"""A wire core with somebody at the other end, in memory: raw frames (`Raw`), or h2 as the client (`Joined`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived
from h2.events import Event as H2Event

from evap.config import ProtocolConfig
from evap.protocol.connection import Http2Core
from evap.protocol.events import Event, Reply, RequestReady, StreamCancelled
from evap.protocol.limits import Shared, to_ns
from tests.protocol import frames

CONFIG = ProtocolConfig()
HIGH_WATER = CONFIG.write_buffer_bytes


def configured(**changes: Any) -> ProtocolConfig:
    return replace(CONFIG, **changes)


class Out(NamedTuple):
    """A frame that the server sent."""

    type: int
    flags: int
    sid: int
    payload: bytes

    @property
    def number(self) -> int:
        """The code of RST_STREAM, the increment of WINDOW_UPDATE."""
        return int.from_bytes(self.payload[:4])


def split(wire: bytes) -> list[Out]:
    out = []
    while wire:
        size = int.from_bytes(wire[:3])
        out.append(Out(wire[3], wire[4], int.from_bytes(wire[5:9]), wire[9 : 9 + size]))
        wire = wire[9 + size :]
    return out


class Raw:
    """A core, and frames thrown at it. `events` and `out` collect what comes back; `now_ns` is the clock."""

    def __init__(self, *, greet: bool = True, shared: Shared | None = None, **changes: Any) -> None:
        self.now_ns = 1
        self.holds = 0  # what the transport is said to keep in its buffer
        self.shared = shared if shared is not None else Shared()
        self.core = Http2Core(configured(**changes), peer="peer", shared=self.shared, now_ns=self.now_ns)
        self.events: list[Event] = []
        self.out: list[Out] = []
        if greet:
            self.send(frames.hello())
            self.out.clear()

    def send(self, *data: bytes) -> list[Event]:
        new = self.core.receive(b"".join(data), self.now_ns)
        while self.core.unread:
            new += self.core.receive(b"", self.now_ns)
        return self._collect(new)

    def wait(self, seconds: float) -> list[Event]:
        """Let time pass, as the shell does: a tick when the deadline is due."""
        self.now_ns += to_ns(seconds)
        new = self.core.tick(self.now_ns) if self.core.deadline_ns <= self.now_ns else []
        return self._collect(new)

    def flush(self) -> list[Event]:
        """What the shell does after replies were used."""
        for _ in range(1000):
            wire = b"".join(self.core.take_output())
            self.out += split(wire)
            new = self.core.written(self.holds, self.now_ns)
            self.events += new
            if not wire:
                break
        return self.events

    def _collect(self, new: list[Event]) -> list[Event]:
        self.events += new
        self.flush()
        return new

    # what came back

    @property
    def goaway(self) -> int | None:
        """Error code of the last GOAWAY."""
        found = [int.from_bytes(f.payload[4:8]) for f in self.out if f.type == frames.GOAWAY]
        return found[-1] if found else None

    def resets(self, sid: int | None = None) -> list[int]:
        return [f.number for f in self.out if f.type == frames.RST_STREAM and sid in (None, f.sid)]

    def requests(self) -> list[RequestReady]:
        return [event for event in self.events if isinstance(event, RequestReady)]

    def cancelled(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, StreamCancelled)]

    def status(self, sid: int) -> int | None:
        """:status of the response on a stream (our encoder is stateless, so any decoder will do)."""
        from hpack import Decoder

        for out in self.out:
            if out.type == frames.HEADERS and out.sid == sid:
                fields = dict(Decoder().decode(out.payload.removeprefix(b"\x20"), raw=True))
                return int(fields[b":status"])
        return None

    def body(self, sid: int) -> bytes:
        return b"".join(f.payload for f in self.out if f.type == frames.DATA and f.sid == sid)

    @property
    def healthy(self) -> bool:
        return not self.core.closing and self.goaway is None


class Joined:
    """h2 as the client, taking its own flow control seriously: it credits nothing unless told to."""

    def __init__(self, *, client: dict[int, int] | None = None, **changes: Any) -> None:
        self.now_ns = 1
        self.core = Http2Core(configured(**changes), peer="peer")
        self.client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self.client.initiate_connection()
        if client:
            self.client.update_settings(client)
        self.events: list[Event] = []
        self.seen: list[H2Event] = []
        self.pump()

    def pump(self) -> list[Event]:
        """Carry bytes both ways until there are none; returns the core's new events."""
        first = len(self.events)
        for _ in range(10_000):
            there = self.client.data_to_send()
            if there:
                self.events += self.core.receive(there, self.now_ns)
                while self.core.unread:
                    self.events += self.core.receive(b"", self.now_ns)
            back = b"".join(self.core.take_output())
            if back:
                self.seen += self.client.receive_data(back)
            self.events += self.core.written(0, self.now_ns)
            if not there and not back:
                return self.events[first:]
        raise AssertionError("the two never fall silent")

    def request(self, body: bytes | None = b"{}", fields: frames.Fields = frames.POST) -> int:
        """A request whose body fits the windows; the stream id."""
        sid = self.client.get_next_available_stream_id()
        self.client.send_headers(sid, fields, end_stream=body is None)
        if body is not None:
            self.client.send_data(sid, body, end_stream=True)
        self.pump()
        return sid

    def reply(self, sid: int) -> Reply:
        return self.core.streams[sid]

    def received(self, sid: int) -> bytes:
        return b"".join(e.data or b"" for e in self.seen if isinstance(e, DataReceived) and e.stream_id == sid)

    def of(self, kind: type[Any], sid: int | None = None) -> list[Any]:
        return [e for e in self.seen if isinstance(e, kind) and (sid is None or e.stream_id == sid)]
