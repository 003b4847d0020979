"""The HTTP/1.1 wire core: the twin of the HTTP/2 one, sans I/O (RFC 9112).

Rule 1: one request at a time. The next pipelined request is parsed only when the response before it has been taken by
        the transport, so a client that does not read cannot make us work.
Rule 2: the phase moves by TRANSITIONS only. A protocol fault answers with an error and ends the connection: after it
        nobody can say where the next request starts.
Rule 3: reading never stops while a response runs, or a client that leaves would go unnoticed. A client may send
        `stream_window_bytes` ahead; what it sends beyond is dropped, and the connection closes after the response.
Rule 4: end of input means that the client is gone, also when it has only shut down its sending side. The two look alike
        until we write, an engine may be silent for minutes, and a GPU that works for nobody costs more than a client
        that half-closes. What was answered before (every route that does not generate) is still delivered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

from evap.config import ProtocolConfig
from evap.errors import ClientError, EvapError, Overloaded, RequestTimeout
from evap.protocol.events import Event, PeerGone, RequestReady, StreamCancelled, WindowOpened
from evap.protocol.http1_parse import Head, Refused, request_head
from evap.protocol.http1_reader import RequestReader, draining
from evap.protocol.http1_reply import Http1Reply
from evap.protocol.limits import NEVER, TOO_MANY_HEADERS, Shared, to_ns

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
#: HTTP/1.1 has no flow-control windows: rows see one that no response uses up.
NO_WINDOW: Final = 1 << 40


class Phase(enum.Enum):
    READ = "read"  #: between requests, or inside one
    REPLY = "reply"  #: a request is with its owner; what else arrives has to wait
    LAST = "last"  #: what is in the output is the last; input is dropped
    GONE = "gone"  #: the connection is over


class Input(enum.Enum):
    REQUEST = "a whole request"
    NEXT = "response taken, the connection is kept"
    CLOSE = "no further request"
    LOST = "end of input, or the connection broke"


TRANSITIONS: Final[dict[tuple[Phase, Input], Phase]] = {
    (Phase.READ, Input.REQUEST): Phase.REPLY,
    (Phase.REPLY, Input.NEXT): Phase.READ,
    (Phase.READ, Input.CLOSE): Phase.LAST,
    (Phase.REPLY, Input.CLOSE): Phase.LAST,
    (Phase.LAST, Input.CLOSE): Phase.LAST,
    (Phase.GONE, Input.CLOSE): Phase.GONE,
    **{(phase, Input.LOST): Phase.GONE for phase in Phase},
}


class Http1Core:
    """See `events.Core`. `peer` is the other end's address for logs; `tls` says which scheme requests have."""

    version = "1.1"

    def __init__(
        self, config: ProtocolConfig, *, peer: str = "", tls: bool = False, shared: Shared | None = None,
        now_ns: int = 0,
    ) -> None:  # fmt: skip
        self.wake: Callable[[], None] | None = None
        self.rows: Any = None
        self.direct: Callable[[bytes | memoryview], int] | None = None
        self.phase = Phase.READ
        #: Close without flushing: the peer takes nothing, or must not take a broken-off response for complete.
        self.aborting = False
        self._config = config
        self._peer = peer
        self._scheme = "https" if tls else "http"
        self._shared = shared if shared is not None else Shared()
        self._reader = RequestReader(config, self._shared, now_ns)
        self._reply: Http1Reply | None = None
        self._overrun = False  # more was sent ahead than we keep
        self._held = 0  # of Shared.header_bytes
        self._now_ns = now_ns
        self._out: list[Any] = []
        self._given = 0  # bytes handed to the transport, ever
        self._queued = 0  # of these, what it still holds
        self._taken_mark = 0  # bytes the peer had taken when it last made progress
        self._progress_ns = now_ns

    # What the shell calls

    def receive(self, data: bytes, now_ns: int) -> list[Event]:
        self._now_ns = now_ns
        events: list[Event] = []
        if self.phase in (Phase.LAST, Phase.GONE) or self._overrun:
            return events
        self._reader.feed(data, now_ns)
        self._advance(events)
        if self.phase is Phase.REPLY and len(self._reader.pending) > self._config.stream_window_bytes:
            self._overrun = True
        self._hold()
        if self._overrun:
            self._reader.clear()
            self._hold()
        return events

    def _hold(self) -> None:
        """Count what is received and not read yet, for all connections together: one head too many is refused, and what
        a client sends ahead is dropped."""
        size, shared = len(self._reader.pending), self._shared
        before, self._held = self._held, size
        shared.header_bytes += size - before
        if size > before and shared.header_bytes > self._config.max_buffered_header_bytes:
            if self.phase is Phase.READ:
                self._fault(Overloaded("too many request headers at once", code=TOO_MANY_HEADERS, retry_after_s=1))
            else:
                shared.hit("header_bytes")
            self._overrun = True

    def eof(self, now_ns: int) -> list[Event]:
        self._now_ns = now_ns
        events: list[Event] = []
        if self.phase is not Phase.GONE:
            self._cancel("client_gone", events)
            self._move(Input.LOST)
            self._reader.clear()
            self._hold()
            events.append(PeerGone())
        return events

    def tick(self, now_ns: int) -> list[Event]:
        self._now_ns = now_ns
        events: list[Event] = []
        if self._queued and now_ns >= self._progress_ns + to_ns(self._config.stall_timeout_s):
            self._shared.hit("stall_timeout")
            self._cancel("stalled", events)
            self._break(reset=True)
        elif self.phase is Phase.READ and now_ns >= self._reader.deadline_ns:
            try:
                self._reader.expire()
                self._shared.hit("idle_timeout" if self._reader.served else "preface_timeout")
                self._move(Input.CLOSE)
            except Refused as refused:
                self._fault(refused.error)
        return events

    @property
    def deadline_ns(self) -> int:
        """Call `tick` then, at the latest."""
        due = self._reader.deadline_ns if self.phase is Phase.READ else NEVER
        if self._queued:
            due = min(due, self._progress_ns + to_ns(self._config.stall_timeout_s))
        return due

    def written(self, queued_bytes: int, now_ns: int) -> list[Event]:
        self._now_ns = now_ns
        events: list[Event] = []
        taken = self._given - queued_bytes
        if not queued_bytes or taken >= self._taken_mark + self._config.min_progress_bytes:
            self._taken_mark, self._progress_ns = taken, now_ns
        self._queued = queued_bytes
        reply = self._reply
        if reply is None:
            return events
        before, reply.buffered = reply.buffered, queued_bytes
        if before and not queued_bytes:
            events.append(WindowOpened(reply))
        if reply.ended and not queued_bytes and not self._out:
            self._turn(reply)
            self._advance(events)
            self._hold()
        return events

    def drain(self, now_ns: int) -> None:
        """Idle connections close now, a request that is still arriving is refused, a running response is the last."""
        self._now_ns = now_ns
        if self.phase is Phase.READ:
            if self._reader.head is not None:
                self._fault(draining())
            elif self._reader.idle:
                self._move(Input.CLOSE)
        self._call_wake()

    def stop(self, now_ns: int) -> list[Event]:
        """The end of the drain: a running response is cancelled, the connection closes."""
        self._now_ns = now_ns
        events: list[Event] = []
        self._cancel("drain", events)
        self._break(reset=False)
        return events

    def take_output(self) -> list[Any]:
        out, self._out = self._out, []
        if out and not self._queued:
            self._progress_ns = self._now_ns
        self._given += sum(map(len, out))
        return out

    @property
    def more(self) -> bool:
        return bool(self._out)

    @property
    def unread(self) -> bool:
        """Never: one request at a time is rule 1."""
        return False

    def release(self) -> None:
        self.wake = self.direct = None

    @property
    def closing(self) -> bool:
        """True also while output is outstanding."""
        return self.phase in (Phase.LAST, Phase.GONE)

    @property
    def open_replies(self) -> int:
        return int(self._reply is not None and not self._reply.ended)

    # What replies call

    def emit(self, data: Any) -> None:
        self._out.append(data)
        if self._queued and self._reply is not None:
            self._reply.buffered += len(data)
        self._call_wake()

    def break_off(self, reply: Http1Reply, *, reset: bool) -> None:
        if reply is self._reply:
            self._reply = None
            self._break(reset=reset)
            self._call_wake()

    def may_keep(self) -> bool:
        return not self._shared.draining and not self._overrun

    def standard_fields(self) -> bytes:
        return b"date: %b\r\nserver: evap\r\n" % self._shared.date(self._now_ns)

    def leave_rows(self, reply: Http1Reply) -> None:
        """The core is about to send on a response itself: what its rows appended stays before it."""
        if self.rows is not None:
            self.rows.release(reply)

    # What rows call (events.RowCore); there are no windows, only a transport that is free or not

    @property
    def connection_window(self) -> int:
        return NO_WINDOW if self.writable else 0

    @property
    def writable(self) -> bool:
        return self.phase is Phase.REPLY and not self._queued

    def acquire(self, reply: Http1Reply) -> int | None:
        return self.stream_window(0) if reply is self._reply and reply.streaming and not reply.buffered else None

    def on_rows(self, stream_id: int, on: bool) -> None:
        pass

    def stream_window(self, stream_id: int) -> int:
        return NO_WINDOW if self._reply is not None and self._reply.streaming else 0

    def spend(self, stream_id: int, n: int) -> None:
        pass

    def take_rows(self, data: Any, frames: int, charge: int) -> bool:
        """Whole step of rows, or nothing (False) while the transport is backed up."""
        if not self.writable:
            return False
        if self.direct is None or self._out:
            self.emit(data)
        elif self.direct(data):
            self._given += len(data)
            self._call_wake()  # for `written` to hear what is queued
        return True

    # Inside

    def _advance(self, events: list[Event]) -> None:
        """Parse as far as the input and rule 1 allow."""
        if self.phase is not Phase.READ:
            return
        try:
            request = self._reader.next(self._now_ns)
        except Refused as refused:
            self._shared.counts["violations"] += isinstance(refused.error, ClientError)
            self._fault(refused.error)
            return
        if request is not None:
            head, body = request
            self._reply = self._new_reply(head)
            self._shared.requests += 1
            self._move(Input.REQUEST)
            events.append(RequestReady(self._reply, request_head(head, scheme=self._scheme, peer=self._peer), body))
        elif (refusal := self._reader.refusal(self._scheme, self._peer)) is not None:
            self._fault(refusal)
        elif self._reader.take_continue():
            self.emit(CONTINUE)

    def _new_reply(self, head: Head | None) -> Http1Reply:
        if head is None:
            return Http1Reply(self, method="GET", http10=False, keeps=False)
        return Http1Reply(self, method=head.method, http10=head.version == "1.0", keeps=head.keep_alive)

    def _turn(self, reply: Http1Reply) -> None:
        """The response has been taken: on to the next request, or close."""
        self._reply = None
        if reply.keeps and self.may_keep():
            self._move(Input.NEXT)
            self._reader.wait(self._now_ns)
        else:
            self._move(Input.CLOSE)

    def _fault(self, error: EvapError) -> None:
        """Answer a request that has not been handed over with an error; the connection ends."""
        if isinstance(error, RequestTimeout) and self._reader.head is None:
            self._shared.hit("header_timeout")
            self._shared.answered(408)
        else:
            self._shared.note(error)
        reply = self._new_reply(self._reader.head)
        self._move(Input.CLOSE)
        self._reader.clear()
        reply.error(error)

    def _break(self, *, reset: bool) -> None:
        """Nothing follows what was written, and with `reset` not even that is flushed."""
        self._move(Input.CLOSE)
        self._reader.clear()
        if reset:
            self.aborting = True
            self._out.clear()

    def _cancel(self, reason: str, events: list[Event]) -> None:
        """The response's owner hears of it, unless the response has been taken completely."""
        reply, self._reply = self._reply, None
        if reply is None or (reply.ended and not reply.buffered):
            return
        self.leave_rows(reply)
        reply.alive = False
        events.append(StreamCancelled(reply, reason))

    def _move(self, event: Input) -> None:
        self.phase = TRANSITIONS[self.phase, event]

    def _call_wake(self) -> None:
        if self.wake is not None:
            self.wake()
