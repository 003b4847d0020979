"""The vocabulary between the wire cores (HTTP/2, HTTP/1.1) and whoever answers: read this file first.

A core takes bytes and a clock reading and returns events; it is answered through the `Reply` of the request.
Nothing here awaits. A Reply is used from the loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evap.protocol.spool import Body

HeaderList = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's head, already held to RFC 9110/9113 rules. Names are lower case; values are raw bytes.

    path is without the query; both are ASCII as received (percent-encoding kept).
    """

    method: str
    path: str
    query: str
    headers: HeaderList
    version: str  # "2" | "1.1" | "1.0"
    scheme: str
    authority: str
    peer: str  # address of the other end, for logs
    index: dict[bytes, bytes] = field(default_factory=dict)  # first value per name
    known: list[Any] = field(default_factory=list, compare=False, repr=False)  # what the answerer has found out of it

    def get(self, name: bytes) -> bytes | None:
        return self.index.get(name)


class Keep(Protocol):
    """Who keeps the body of a pushed answer."""

    def add(self, data: bytes) -> None:
        """The next octets; they come in portions, some time after they were sent."""
        ...

    def close(self, complete: bool) -> None:
        """The stream is over; `complete`: all of the body was sent, within the windows."""
        ...


class Reply(Protocol):
    """One response in the making. start -> send* -> end, or abort at any time. Calls after the end or after the peer
    has gone are ignored (the peer may go at any moment; nobody has to ask first)."""

    #: "2" or "1.1"
    version: str
    #: False once ended, aborted, reset by the peer, or the connection is gone.
    alive: bool
    #: Free for the exchange; None until it sets it.
    owner: object
    #: Body bytes queued here that the flow-control window or the transport does not take yet; after StreamCancelled,
    #: what they never took.
    buffered: int
    #: The connection's core, and the HTTP/2 stream (0 over HTTP/1.1): what rows.py needs to join a stream.
    core: Any
    stream_id: int

    def start(self, status: int, headers: HeaderList) -> None:
        """Response head of a streamed body. HTTP/1.1 adds transfer-encoding, both add date and server."""
        ...

    def send(self, data: bytes) -> None:
        """Body bytes, in order. Queued without bound here: the caller watches `buffered`."""
        ...

    def end(self, trailers: HeaderList = ()) -> None: ...

    def whole(self, status: int, headers: HeaderList, body: bytes) -> None:
        """A complete answer with content-length (no body is sent for HEAD, and content-length is kept)."""
        ...

    def abort(self) -> None:
        """Break the response off so that the client cannot take it for complete: RST_STREAM INTERNAL_ERROR, or close
        the HTTP/1.1 connection without the last chunk."""
        ...

    def refuse(self) -> None:
        """Nothing was done for this request, try elsewhere: RST_STREAM REFUSED_STREAM, or 503 and close in HTTP/1.1."""
        ...

    @property
    def pushable(self) -> bool:
        """`push` would give a reply now, once this one is started. Always False over HTTP/1.1."""
        ...

    def push(self, path: bytes, keep: Keep | None) -> Reply | None:
        """Promise the answer to `GET path` beside this one (RFC 9113 8.4). None: not on this connection, or not now;
        then nothing has happened. The reply is to be started in the same call: a promise takes no place among the
        client's streams until then. It ends by itself when this one is reset. `keep` gets the body, as it was sent."""
        ...


@dataclass(frozen=True, slots=True)
class RequestReady:
    """A whole request has arrived (head and body, within limits)."""

    reply: Reply
    head: RequestHead
    body: Body


@dataclass(frozen=True, slots=True)
class StreamCancelled:
    """The client no longer wants this response: RST_STREAM, a closed connection, a stalled reader past its deadline.

    Comes at most once per reply, and never after its response was completely written.
    reason: "client_reset" | "client_gone" | "stalled" | "protocol_error" | "drain"
    """

    reply: Reply
    reason: str


@dataclass(frozen=True, slots=True)
class WindowOpened:
    """`reply.buffered` fell to zero after it had been above it: coalesced tokens may go out, rows may resume; or, after
    its end, all of it was taken."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The connection is over. StreamCancelled for each of its open replies came before."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class PriorityChanged:
    """PRIORITY_UPDATE for a request that was handed over (RFC 9218 7): the field value, not validated."""

    reply: Reply
    value: bytes


Event = RequestReady | StreamCancelled | WindowOpened | PriorityChanged | PeerGone


class Core(Protocol):
    """A wire core: sans I/O. The transport shell drives it; HTTP/2 and HTTP/1.1 are twins here."""

    #: Set by the shell. A core calls it when a Reply was used while the core was not in one of the calls below, so that
    #: the shell flushes once in this loop pass. Cheap and idempotent; None in tests that drain by hand.
    wake: Callable[[], None] | None

    def receive(self, data: bytes, now_ns: int) -> list[Event]:
        """Bytes in, events out. Never raises for anything a peer sends; look at `closing` and `take_output` after."""
        ...

    def eof(self, now_ns: int) -> list[Event]:
        """The peer half-closed or the connection broke."""
        ...

    def tick(self, now_ns: int) -> list[Event]:
        """Deadlines (about once a second, and before `deadline_ns`)."""
        ...

    def written(self, queued_bytes: int, now_ns: int) -> list[Event]:
        """The transport's write buffer now holds `queued_bytes` (called after each write, and when it drains)."""
        ...

    def drain(self, now_ns: int) -> None:
        """Graceful shutdown: refuse new requests, finish running ones, then close (design/http2.md fact 9)."""
        ...

    def take_output(self) -> Sequence[bytes | memoryview]:
        """Bytes to write now, in order; the caller writes them in one call."""
        ...

    @property
    def more(self) -> bool:
        """There may be more output already: ask `take_output` again."""
        ...

    @property
    def unread(self) -> bool:
        """Input is left that was not handled in this turn: call `receive` again, with b"" if need be."""
        ...

    def release(self) -> None:
        """After `eof`, when the transport is gone: nothing is called any more."""
        ...

    @property
    def closing(self) -> bool:
        """Close the transport once the output is written."""
        ...

    @property
    def open_replies(self) -> int: ...


class RowsHost(Protocol):
    """Whoever writes DATA frames of its own (the row buffers) and therefore keeps stream windows of its own.

    The connection's window always lives in the core, which takes what `take_rows` is given off it.
    A stream's window lives with the host between `acquire` and `on_rows(stream_id, False)`.
    """

    def before_window_frame(self, core: RowCore, stream_id: int) -> None:
        """A frame is about to change windows: write yours back with `core.spend`. stream_id 0: all of this core's."""
        ...

    def after_window_frame(self, core: RowCore, stream_id: int) -> None:
        """Read yours again with `core.stream_window` and `core.connection_window`. stream_id 0: all of this core's."""
        ...

    def release(self, reply: Reply) -> None:
        """`reply` leaves the rows now (it is sent to, ended, aborted, reset): `core.spend` what it used, and
        `core.on_rows(stream_id, False)`. Also called when the stream is already closed; spending is then ignored."""
        ...


class RowCore(Protocol):
    """What an HTTP/2 core offers to a RowsHost. stream_id is `reply.stream_id`."""

    rows: RowsHost | None
    #: Set by the shell: writes to the socket at once and returns the octets that are queued after it. Rows go this way
    #: when nothing else waits: a step then costs a connection one call and one system call.
    direct: Callable[[bytes | memoryview], int] | None

    @property
    def connection_window(self) -> int: ...

    @property
    def writable(self) -> bool:
        """False while the transport holds more than its high-water mark, or the connection is closing."""
        ...

    def acquire(self, reply: Reply) -> int | None:
        """The stream's outbound window, and the stream is on rows from now on. None (and nothing changes) unless the
        reply is alive, started, not ended, expects a body and has nothing buffered."""
        ...

    def on_rows(self, stream_id: int, on: bool) -> None: ...

    def stream_window(self, stream_id: int) -> int:
        """May be negative (RFC 9113 6.9.2); 0 for a closed stream."""
        ...

    def spend(self, stream_id: int, n: int) -> None:
        """Take n bytes off the stream's window, and nothing else. Ignored for a closed stream."""
        ...

    def take_rows(self, data: bytes | memoryview, frames: int, charge: int) -> bool:
        """Ready DATA frames (`frames` of them), in order with everything else, that flow control counts as `charge`
        bytes. False, and nothing happens, if the connection's window is smaller or its transport is backed up.
        `data` is kept by reference until it is written: give it away."""
        ...
