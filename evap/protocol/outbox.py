"""Everything that is not a row, on its way out: queued bodies become DATA frames, within the windows.

One turn is one frame of at most 16 KiB, so a large body holds nobody up. Streams of lower urgency have their turns
before others (RFC 9218 10). Equals take turns, whether they say `i` or not: what is streamed here is of use in parts.
A stream without window leaves its ring and comes back when its window changes. Output is bounded by what the transport
takes: `drain` stops at `room` octets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from evap.protocol.h2seam import H2Stream, ServerConnection
from evap.protocol.limits import MAX_DATA_FRAME, Budgets
from evap.protocol.stream import State, Stream


class Outbox:
    """`out` is what the shell writes next, in order; `size` its octets."""

    __slots__ = ("_budgets", "_conn", "_rings", "_sent_end", "out", "size", "table_update")

    def __init__(self, conn: ServerConnection, budgets: Budgets, sent_end: Callable[[Stream], None]) -> None:
        self._conn = conn
        self._budgets = budgets
        self._sent_end = sent_end
        self._rings: dict[int, deque[Stream]] = {}  # by urgency, for those that have any
        self.out: list[bytes | memoryview] = []
        self.size = 0
        #: Octets before the next header block: the client has set HEADER_TABLE_SIZE (RFC 7541 4.2).
        self.table_update = b""

    def pull(self) -> None:
        """Take over what h2 has queued (acknowledgements, WINDOW_UPDATE, RST_STREAM, GOAWAY); before adding ours."""
        data = self._conn.data_to_send()
        if data:
            self.append(data)

    def append(self, data: bytes | memoryview) -> None:
        self.out.append(data)
        self.size += len(data)

    def head(self, stream: Stream, block: bytes, *, end: bool, informational: bool = False) -> None:
        """HEADERS; they are not flow-controlled and go at once."""
        self.append(self._conn.head(stream.h2, self._next_block(block), end=end, informational=informational))

    def promise(self, parent: Stream, block: bytes) -> H2Stream:
        """PUSH_PROMISE, at once; returns the stream that is reserved by it."""
        reserved, frame = self._conn.promise(parent.h2, self._next_block(block))
        self.append(frame)
        return reserved

    def _next_block(self, block: bytes) -> bytes:
        self.pull()
        if self.table_update:
            block, self.table_update = self.table_update + block, b""
        return block

    def hurry(self, stream: Stream) -> None:
        """Send what was queued on this stream just now, as far as windows allow: something that is not DATA follows."""
        if not stream.waited:
            self.pull()
            while stream.buffered and self._turn(stream):
                pass

    def take(self) -> list[bytes | memoryview]:
        out, self.out, self.size = self.out, [], 0
        return out

    def release(self) -> None:
        """Nothing is sent any more: hold nobody."""
        self._rings.clear()
        self._sent_end = _nothing

    def add(self, stream: Stream) -> None:
        if not stream.queued:
            stream.queued = True
            ring = self._rings.get(stream.urgency)
            if ring is None:
                ring = self._rings[stream.urgency] = deque()
            ring.append(stream)

    def move(self, stream: Stream, urgency: int) -> None:
        """The stream has another urgency from now on."""
        if stream.queued and stream.urgency != urgency:
            ring = self._rings[stream.urgency]
            ring.remove(stream)
            if not ring:
                del self._rings[stream.urgency]
            stream.queued = False
            stream.urgency = urgency
            self.add(stream)
        stream.urgency = urgency

    @property
    def pending(self) -> bool:
        return bool(self._rings)

    def drain(self, now_ns: int, room: int) -> list[Stream]:
        """Send what the windows and `room` allow. Returns the streams that had waited and are empty now."""
        opened: list[Stream] = []
        if self._rings:
            self.pull()
            for urgency in sorted(self._rings):
                self._drain_ring(self._rings[urgency], now_ns, room, opened)
                if not self._rings[urgency]:
                    del self._rings[urgency]
        return opened

    def _drain_ring(self, ring: deque[Stream], now_ns: int, room: int, opened: list[Stream]) -> None:
        blocked: list[Stream] = []
        while ring:
            stream = ring.popleft()
            if stream.state is State.CLOSED or not (stream.buffered or stream.ended):
                stream.queued = False
            elif stream.buffered and (self._conn.outbound_flow_control_window <= stream.reserve or self.size >= room):
                blocked.append(stream)  # stays in the ring: the connection is what it waits for
            elif self._turn(stream):
                ring.append(stream)
            else:
                stream.queued = False
                self._settle(stream, now_ns, opened)
        for stream in blocked:
            self._settle(stream, now_ns, opened)
        ring.extend(blocked)

    def _turn(self, stream: Stream) -> bool:
        """One frame. True if the stream may have another."""
        if not stream.buffered:
            self._finish(stream)
            return False
        conn = self._conn
        spare = conn.outbound_flow_control_window - stream.reserve
        size = min(stream.h2.outbound_flow_control_window, spare, MAX_DATA_FRAME)
        if size <= 0:
            return False
        size = min(size, stream.buffered)
        last = stream.ended and size == stream.buffered and not stream.trailers
        payload = take(stream.queue, size)
        stream.buffered -= size
        stream.progress += size
        self.append(conn.data_header(stream.h2, size, end=last) + payload)
        if size >= self._budgets.tiny:
            self._budgets.window.give(self._budgets.credit)
        if last:
            self._sent_end(stream)
            return False
        return bool(stream.buffered) or stream.ended

    def _finish(self, stream: Stream) -> None:
        """Nothing is queued any more and the end was asked for: trailers, or an empty DATA with END_STREAM."""
        if stream.trailers:
            self.head(stream, stream.trailers, end=True)
        else:
            self.append(self._conn.data_header(stream.h2, 0, end=True))
        self._sent_end(stream)

    @staticmethod
    def _settle(stream: Stream, now_ns: int, opened: list[Stream]) -> None:
        """At the end of a flush: who waits, since when, and who has stopped waiting."""
        if stream.buffered:
            stream.waited = True
            if stream.stalled_ns is None or stream.progress >= stream.core.config.min_progress_bytes:
                stream.stalled_ns = now_ns
                stream.progress = 0
            return
        stream.stalled_ns = None
        stream.progress = 0
        if stream.waited:
            stream.waited = False
            opened.append(stream)


def take(queue: deque[bytes | bytearray | memoryview], size: int) -> bytes:
    """The first `size` octets of the queue, which has at least that many."""
    first = queue[0]
    if len(first) == size:
        return bytes(queue.popleft())
    if len(first) > size:
        view = memoryview(first)
        queue[0] = view[size:]  # a view: a large body is not copied once per frame
        return bytes(view[:size])
    parts = []
    while size:
        first = queue.popleft()
        if len(first) > size:
            view = memoryview(first)
            queue.appendleft(view[size:])
            first = view[:size]
        size -= len(first)
        parts.append(first)
    return b"".join(parts)


def _nothing(stream: Stream) -> None:
    """What is left of `sent_end` when the connection is gone."""
