"""One HTTP/2 connection without I/O: bytes and a clock in, events out, bytes out (events.Core).

    gate (whole frames) -> inbound (what a frame means) -> stream table -> events
    Reply calls -> outbox (windows, fairness) -> take_output

Rules: `streams` is the only table of open streams; nothing here awaits; a violation of RFC 9113 by the peer is a
`Violation`, caught in one place, and everything else that raises is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from evap.config import ProtocolConfig
from evap.errors import EvapError
from evap.protocol import deadlines, hpack_out
from evap.protocol import headers as code
from evap.protocol.events import Event, HeaderList, PeerGone, RequestReady, RowsHost, StreamCancelled
from evap.protocol.events import WindowOpened as Opened
from evap.protocol.farewell import Farewell
from evap.protocol.gate import Violation
from evap.protocol.h2seam import ServerConnection
from evap.protocol.inbound import Inbound
from evap.protocol.limits import NEVER, Budgets, Shared, WriteProgress, to_ns
from evap.protocol.outbox import Outbox
from evap.protocol.push import Pushes
from evap.protocol.rowseam import RowSeam
from evap.protocol.spending import spend
from evap.protocol.stream import Action, Input, State, Stream

SERVER: Final = hpack_out.field(b"server", b"evap")


class Http2Core(RowSeam):
    """See events.Core for the calls and events.RowCore for the seam with the row buffers.

    The first bytes given to `receive` are the client's preface. `deadline_ns`: call `tick` then, at the latest.
    """

    def __init__(
        self, config: ProtocolConfig, *, peer: str = "", tls: bool = False, shared: Shared | None = None,
        now_ns: int = 0) -> None:  # fmt: skip
        self.config = config
        self.peer = peer
        self.tls = tls
        self.shared = shared if shared is not None else Shared()
        self.wake: Callable[[], None] | None = None
        self.rows: RowsHost | None = None
        self.direct: Callable[[bytes | memoryview], int] | None = None
        self.high_water = config.write_buffer_bytes
        self.row_frames = 0  # rows sent that the WINDOW_UPDATE budget has not been credited for yet
        self.streams: dict[int, Stream] = {}
        self.conn = ServerConnection(config)
        self.budgets = Budgets(config)
        self.outbox = Outbox(self.conn, self.budgets, self.sent_end)
        self.pushes = Pushes(self)
        self.events: list[Event] = []
        self.ready: list[Stream] = []
        self.now_ns = now_ns
        self.draining = False
        self.peer_leaving = False  # the client has sent GOAWAY
        self.settings_acked = False
        self.inbound = Inbound(self)
        self._closing = self._gone = self._busy = False
        self.aborting = False  # close without waiting for what is queued: the peer does not read
        self.writes = WriteProgress(now_ns)
        self.started_ns = now_ns
        self.farewell = Farewell()
        self.active_ns = now_ns
        self.deadline_ns = now_ns + to_ns(min(config.preface_timeout_s, config.settings_timeout_s))

    # --- events.Core ---

    def receive(self, data: bytes, now_ns: int) -> list[Event]:
        if self._closing:
            return []
        self.now_ns = self.active_ns = now_ns
        self._busy = True
        try:
            self.inbound.receive(data)
        except Violation as violation:
            self._fail(violation)
        return self._finish_call()

    def eof(self, now_ns: int) -> list[Event]:
        """A half-closed connection counts as gone: FIN is the only sign of a client that has died, and a client that
        cannot send WINDOW_UPDATE or RST_STREAM any more could not be served for long."""
        if self._gone:
            return []
        self._gone = self._busy = self._closing = True
        self.now_ns = now_ns
        self.cancel_all("client_gone")
        events = self._finish_call()
        events.append(PeerGone())
        return events

    def tick(self, now_ns: int) -> list[Event]:
        self.deadline_ns = NEVER
        if self._closing:
            return []
        self.now_ns = now_ns
        self._busy = True
        try:
            deadlines.check_connection(self)
            for stream in list(self.streams.values()):
                deadlines.check_stream(self, stream)
        except Violation as violation:
            self._fail(violation)
        return self._finish_call()

    def written(self, queued_bytes: int, now_ns: int) -> list[Event]:
        self.now_ns = now_ns
        self.writes.note(queued_bytes, now_ns)
        if queued_bytes:
            self.arm(self.writes.since_ns + to_ns(self.config.stall_timeout_s))
        if not self.outbox.pending and not self.events:
            return []
        self._busy = True
        return self._finish_call()

    def drain(self, now_ns: int) -> None:
        """Refuse new streams from now on; what follows is in `farewell.py`."""
        self.now_ns = now_ns
        self.draining = True
        self._leave_if_done()
        self._notify()

    def stop(self, now_ns: int) -> list[Event]:
        """The end of the drain: running streams are cancelled, the connection closes."""
        if self._closing:
            return []
        self.now_ns = now_ns
        self._busy = True
        for stream in list(self.streams.values()):
            self.break_stream(stream, code.CANCEL, "drain")
        self.goodbye(code.NO_ERROR, "shutting down")
        return self._finish_call()

    def take_output(self) -> list[bytes | memoryview]:
        self._flush()
        self._leave_if_done()
        self.outbox.pull()
        self.writes.given(self.outbox.size)
        return self.outbox.take()

    @property
    def more(self) -> bool:
        return bool(self.outbox.out)  # what is pending waits for a window or for `written`

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def unread(self) -> bool:
        return self.inbound.unread and not self._closing

    @property
    def open_replies(self) -> int:
        return len(self.streams)

    def release(self) -> None:  # without cycles the core is freed at once, and no flood makes collections long
        self.inbound.release()
        del self.inbound, self.pushes
        self.outbox.release()
        self.conn.release()
        self.wake = self.direct = None

    # --- for the inbound side and streams ---
    def arm(self, at_ns: int) -> None:
        self.deadline_ns = min(self.deadline_ns, at_ns)

    def send_head(self, stream: Stream, status: int, headers: HeaderList, *, end: bool) -> None:
        """A final response head. Raises headers.BadHeader for a bad field of ours; nothing has been sent then."""
        date = hpack_out.field(b"date", self.shared.date(self.now_ns))
        block = b"".join((hpack_out.status(status), hpack_out.block(headers), date, SERVER))
        stream.started = True
        if status in (204, 304):
            stream.no_body = end = True
        self.outbox.head(stream, block, end=end)
        if end:
            stream.alive = False
            self.sent_end(stream)
        self._notify()

    def enqueue(self, stream: Stream) -> None:
        self.outbox.add(stream)
        self._notify()

    def answer(self, stream: Stream, error: EvapError) -> None:
        """An error of the request, before anybody has it: the rest of the body is not wanted."""
        self.shared.note(error)
        stream.move(Input.REFUSE)
        stream.drop_body()
        status, _ = code.wire_code(error)
        fields = [*code.error_headers(error), *code.echoed_if_valid(stream.head)]
        stream.whole(status, fields, code.error_body(error))

    def break_off(self, stream: Stream, *, refused: bool) -> None:
        """Reply.abort and Reply.refuse: whoever calls knows, so there is no event."""
        self._reset(stream, code.REFUSED_STREAM if refused else code.INTERNAL_ERROR)
        self.close_stream(stream, Input.BROKEN, "")
        self._notify()

    def break_stream(self, stream: Stream, error: int, reason: str) -> None:
        """We give the stream up; whoever has the request hears `reason`."""
        self._reset(stream, error)
        self.close_stream(stream, Input.BROKEN, reason)

    def sent_end(self, stream: Stream) -> None:
        if stream.move(Input.SENT_END) is Action.LINGER:
            stream.linger(self.now_ns)
        else:
            self.forget(stream)

    def spend_reset(self) -> None:
        """Raises Violation when the client has made us reset too often."""
        spend(self, "resets")

    def goodbye(self, error: int, reason: str) -> None:
        """GOAWAY with our reason, and close when it is written."""
        if not self._closing:
            self.outbox.pull()
            self.conn.goaway(error, reason)
            self._closing = True
            self.deadline_ns = NEVER

    # --- inside ---

    def _notify(self) -> None:
        if not self._busy and self.wake is not None:
            self.wake()

    def _finish_call(self) -> list[Event]:
        """At the end of every call that returns events: hand requests over, flush, collect."""
        events = self.events
        # Frames of the same read that are left may still reset what is ready (CVE-2023-44487).
        ready, self.ready = ([], self.ready) if self.unread else (self.ready, [])
        for stream in ready:
            head = stream.head
            if stream.state is State.ANSWERING and stream.alive and head is not None:
                stream.delivered = True
                self.shared.requests += 1
                events.append(RequestReady(stream, head, stream.take_body()))
        self._flush()
        self._leave_if_done()
        self.events = []
        self._busy = False
        return events

    def _flush(self) -> None:
        if self.outbox.pending and not self._closing:
            opened = self.outbox.drain(self.now_ns, self.high_water - self.writes.queued)
            self.events += [Opened(stream) for stream in opened if stream.delivered]
            self.arm(self.now_ns + to_ns(self.config.stall_timeout_s))

    def _leave_if_done(self) -> None:
        if (self.draining or self.peer_leaving) and not self.streams and not self.ready and not self.unread:
            self.farewell.step(self)

    def _fail(self, violation: Violation) -> None:
        self.shared.violation(violation.limit)
        self.goodbye(violation.code, violation.reason)
        self.cancel_all("protocol_error")

    def cancel_all(self, reason: str) -> None:
        for stream in list(self.streams.values()):
            self.close_stream(stream, Input.GONE, reason)

    def _reset(self, stream: Stream, error: int) -> None:
        self.outbox.pull()
        self.conn.reset(stream.h2, error)

    def close_stream(self, stream: Stream, event: Input, reason: str) -> None:
        if stream.move(event) is Action.CANCEL:
            if stream.delivered and reason:
                self.events.append(StreamCancelled(stream, reason))
            else:
                stream.buffered = 0
            if self.pushes.busy:
                self.pushes.cut(stream, event)
            self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """The stream is CLOSED: out of the table, nothing stays behind but `buffered`: what its reader never took."""
        stream.alive = False
        self.leave_rows(stream)
        stream.queue.clear()
        stream.drop_body()
        if stream.delivered:
            self.farewell.answered_ns = self.now_ns
        self.shared.closed(stream.head_bytes)
        if self.pushes.busy:
            self.pushes.closed(stream)
        del self.streams[stream.stream_id]
        self.conn.closed_one()
        if not self.streams:
            self.active_ns = self.now_ns
            self.arm(self.now_ns + to_ns(self.config.idle_timeout_s))
