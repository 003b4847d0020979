"""A stream's life. Rule: every move of `Stream.state` goes through TABLE; a pair that is not in it cannot happen.

                 head               END_STREAM in              END_STREAM out
    (idle) ---------------> RECEIVING ----------> ANSWERING ------------------> CLOSED
                               |  refused with         ^                          ^
                               |  a status             | END_STREAM in            | END_STREAM in, or
                               +------------> EARLY ---+                          | RST_STREAM NO_ERROR
                                                |                                 | after a moment
                                                +----> LINGERING -----------------+
                                      END_STREAM out

A stream leaves the core's table when it is CLOSED; an id that is not in it and not idle *is* CLOSED, so late frames
find their transition here too. h2 keeps its own states (RFC 9113 5.1) for what may be sent; these say what it means.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Final

from evap.protocol import hpack_out
from evap.protocol.events import HeaderList, Keep, Reply, RequestHead
from evap.protocol.limits import MAX_DATA_FRAME, to_ns
from evap.protocol.priority import DEFAULT_URGENCY
from evap.protocol.spool import Body, Spool

if TYPE_CHECKING:
    from evap.protocol.connection import Http2Core
    from evap.protocol.h2seam import H2Stream


class State(enum.IntEnum):
    RECEIVING = 0  #: the head is here, the body is coming
    ANSWERING = 1  #: the whole request is here; it has been handed over, or will be at the end of this read
    EARLY = 2  #: answered with a status before the body was here; what still comes is thrown away
    LINGERING = 3  #: that answer is complete; the client may take it before we reset, or end its request itself
    CLOSED = 4


class Input(enum.IntEnum):
    DATA = 0  #: DATA without END_STREAM
    END = 1  #: END_STREAM, on DATA or trailers
    REFUSE = 2  #: we answer at once
    RESET = 3  #: RST_STREAM from the client
    SENT_END = 4  #: our END_STREAM is in the output
    BROKEN = 5  #: we reset it: malformed, aborted, stalled
    GONE = 6  #: the connection is over


class Action(enum.IntEnum):
    KEEP = 0  #: store the body
    HAND_OVER = 1  #: the request is complete
    DISCARD = 2  #: throw the body away (its window is credited all the same)
    CANCEL = 3  #: whoever has the request hears of it, if it was handed over and not yet answered completely
    FINISH = 4  #: nothing more to do
    LINGER = 5  #: the answer is complete and the request is not: reset it in a moment (--linger)
    LATE = 6  #: a frame for a closed stream: h2 answers RST_STREAM and credits the window; we count it
    IGNORE = 7


_S, _I, _A = State, Input, Action

TABLE: Final[dict[tuple[State, Input], tuple[Action, State]]] = {
    (_S.RECEIVING, _I.DATA): (_A.KEEP, _S.RECEIVING),
    (_S.RECEIVING, _I.END): (_A.HAND_OVER, _S.ANSWERING),
    (_S.RECEIVING, _I.REFUSE): (_A.IGNORE, _S.EARLY),
    (_S.RECEIVING, _I.RESET): (_A.CANCEL, _S.CLOSED),
    (_S.RECEIVING, _I.BROKEN): (_A.CANCEL, _S.CLOSED),
    (_S.RECEIVING, _I.GONE): (_A.CANCEL, _S.CLOSED),
    (_S.EARLY, _I.DATA): (_A.DISCARD, _S.EARLY),
    (_S.EARLY, _I.END): (_A.DISCARD, _S.ANSWERING),
    (_S.EARLY, _I.REFUSE): (_A.IGNORE, _S.EARLY),
    (_S.EARLY, _I.SENT_END): (_A.LINGER, _S.LINGERING),
    (_S.EARLY, _I.RESET): (_A.CANCEL, _S.CLOSED),
    (_S.EARLY, _I.BROKEN): (_A.CANCEL, _S.CLOSED),
    (_S.EARLY, _I.GONE): (_A.CANCEL, _S.CLOSED),
    (_S.LINGERING, _I.DATA): (_A.DISCARD, _S.LINGERING),
    (_S.LINGERING, _I.END): (_A.FINISH, _S.CLOSED),
    (_S.LINGERING, _I.REFUSE): (_A.IGNORE, _S.LINGERING),
    (_S.LINGERING, _I.RESET): (_A.CANCEL, _S.CLOSED),
    (_S.LINGERING, _I.BROKEN): (_A.CANCEL, _S.CLOSED),
    (_S.LINGERING, _I.GONE): (_A.CANCEL, _S.CLOSED),
    (_S.ANSWERING, _I.DATA): (_A.LATE, _S.ANSWERING),
    (_S.ANSWERING, _I.END): (_A.LATE, _S.ANSWERING),
    (_S.ANSWERING, _I.REFUSE): (_A.IGNORE, _S.ANSWERING),
    (_S.ANSWERING, _I.SENT_END): (_A.FINISH, _S.CLOSED),
    (_S.ANSWERING, _I.RESET): (_A.CANCEL, _S.CLOSED),
    (_S.ANSWERING, _I.BROKEN): (_A.CANCEL, _S.CLOSED),
    (_S.ANSWERING, _I.GONE): (_A.CANCEL, _S.CLOSED),
    (_S.CLOSED, _I.DATA): (_A.LATE, _S.CLOSED),
    (_S.CLOSED, _I.END): (_A.LATE, _S.CLOSED),
    (_S.CLOSED, _I.REFUSE): (_A.IGNORE, _S.CLOSED),
    (_S.CLOSED, _I.RESET): (_A.IGNORE, _S.CLOSED),
    (_S.CLOSED, _I.BROKEN): (_A.IGNORE, _S.CLOSED),
    (_S.CLOSED, _I.GONE): (_A.IGNORE, _S.CLOSED),
}


class Stream:
    """One request and its Reply (see events.Reply). The queue is emptied by the outbox; the core does the sending."""

    __slots__ = (
        "alive",
        "buffered",
        "chunks",
        "core",
        "delivered",
        "ended",
        "h2",
        "head",
        "head_bytes",
        "length",
        "no_body",
        "on_rows",
        "owner",
        "progress",
        "queue",
        "queued",
        "received",
        "seen_ns",
        "spool",
        "stalled_ns",
        "started",
        "state",
        "stream_id",
        "trailers",
        "urgency",
        "waited",
    )

    version = "2"
    #: octets of the connection's window that this stream may not take
    reserve = 0

    def __init__(self, core: Http2Core, h2: H2Stream, now_ns: int) -> None:
        self.core = core
        self.h2 = h2
        self.stream_id: int = h2.stream_id
        self.state = State.RECEIVING
        self.alive = True
        self.owner: object = None
        # request
        self.head: RequestHead | None = None
        self.length: int | None = None
        self.chunks: list[bytes] = []
        self.spool: Spool | None = None  # instead of chunks, for a large body
        self.received = 0  # octets of body, without padding
        self.seen_ns = now_ns  # when the last of it came
        self.delivered = False  # RequestReady has been returned
        self.urgency = DEFAULT_URGENCY  # RFC 9218, for the outbox (which must hear of changes)
        self.head_bytes = 0  # counted in Shared.header_bytes
        # response
        self.started = False
        self.no_body = False  # HEAD, 204, 304
        self.ended = False
        self.trailers = b""  # encoded
        self.queue: deque[bytes | bytearray | memoryview] = deque()
        self.buffered = 0
        self.queued = False  # in the outbox's ring
        self.waited = False  # buffered was above zero at the end of a flush
        self.stalled_ns: int | None = None  # since when the reader is slow
        self.progress = 0  # octets it took since then
        self.on_rows = False

    def move(self, event: Input) -> Action:
        action, self.state = TABLE[self.state, event]
        return action

    def store(self, piece: bytes) -> None:
        """Store a piece of the body. Raises OSError when there is no memory for it."""
        shared = self.core.shared
        if self.spool is not None:
            self.spool.write(piece)
            return
        self.chunks.append(piece)
        shared.body_bytes += len(piece)
        if self.received > shared.spool_over:
            self.spool = Spool(shared, self.chunks)
            self.chunks = []

    def take_body(self) -> Body:
        """The body, for its owner; it is here no longer."""
        if self.spool is not None:
            spool, self.spool = self.spool, None
            return spool
        body = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
        self.drop_body()
        return body

    def drop_body(self) -> None:
        self.core.shared.body_bytes -= sum(map(len, self.chunks))
        self.chunks = []
        if self.spool is not None:
            self.spool.close()
            self.spool = None

    def linger(self, now_ns: int) -> None:
        """The answer is complete before the request is; what still comes is counted anew, and thrown away until the
        client is silent for a moment. RFC 9113 8.1 and RFC 9112 9.6 let us stop at once, but clients lose the answer
        then: curl 7.88 when RST_STREAM comes with it, httpcore when its upload is not credited."""
        self.seen_ns, self.received = now_ns, 0
        self.core.arm(now_ns + to_ns(self.core.config.linger_s))

    def start(self, status: int, headers: HeaderList) -> None:
        if self.alive and not self.started:
            self.core.send_head(self, status, headers, end=False)

    def send(self, data: bytes) -> None:
        if not self.alive or not self.started or self.no_body or not data:
            return
        if self.on_rows:
            self.core.leave_rows(self)
        if self.waited:
            self._append(data)
        else:
            self.queue.append(data)
        self.buffered += len(data)
        self.core.enqueue(self)

    def _append(self, data: bytes) -> None:
        """To what a slow reader has not taken: one piece of many events, because an object for each costs a third of
        what is in it."""
        queue = self.queue
        last = queue[-1] if queue else None
        if type(last) is bytearray and len(last) < MAX_DATA_FRAME:
            last += data
        else:
            if last:
                queue[-1] = bytes(last)  # what it has grown in advance is an eighth
            queue.append(bytearray(data) if len(data) < MAX_DATA_FRAME else data)

    def end(self, trailers: HeaderList = ()) -> None:
        """Raises headers.BadHeader for a bad trailer of ours, and nothing has happened then."""
        block = hpack_out.block(trailers) if trailers else b""
        if not self.alive:
            return
        if not self.started:
            self.abort()
            return
        if self.on_rows:
            self.core.leave_rows(self)
        self.alive = False
        self.ended = True
        self.trailers = block
        self.core.enqueue(self)

    def whole(self, status: int, headers: HeaderList, body: bytes) -> None:
        if not self.alive or self.started:
            return
        sized = [*headers, (b"content-length", b"%d" % len(body))] if status not in (204, 304) else headers
        self.core.send_head(self, status, sized, end=not body or self.no_body or status in (204, 304))
        if self.alive:
            self.send(body)
            self.end()

    @property
    def pushable(self) -> bool:
        return self.alive and self.core.pushes.possible(self)

    def push(self, path: bytes, keep: Keep | None) -> Reply | None:
        return self.core.pushes.promise(self, path, keep) if self.alive else None

    def abort(self) -> None:
        if self.alive:
            self.core.break_off(self, refused=False)

    def refuse(self) -> None:
        if self.alive:
            self.core.break_off(self, refused=not self.started)
