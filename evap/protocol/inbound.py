"""What a frame from the client means: one handler per frame type, in one table (RFC 9113 section 6, RFC 9218)."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from evap.errors import HeadersTooLarge, Overloaded
from evap.protocol import farewell, gate
from evap.protocol import headers as code
from evap.protocol.early import Early
from evap.protocol.events import RequestHead
from evap.protocol.gate import Frame, Gate, SettingsFilter, Violation
from evap.protocol.h2seam import SettingsAcknowledged, StreamReset
from evap.protocol.hpack_in import Fields, OversizedList
from evap.protocol.hpack_out import NO_TABLE
from evap.protocol.limits import MAX_FRAME, TOO_MANY_BODIES, to_ns
from evap.protocol.priority_frames import Priorities
from evap.protocol.request_head import Head, Malformed, check_trailers, parse
from evap.protocol.spending import Held, spend
from evap.protocol.stream import Action, Input, State, Stream

if TYPE_CHECKING:
    from evap.protocol.connection import Http2Core

#: A SETTINGS frame costs about eight times a PING.
SETTINGS_COST: Final = 4.0
_NO_HEAD: Final = Head(RequestHead("", "", "", (), "2", "", "", ""), None, None, False, 0)


class Inbound:
    """Handlers for one core. They raise Violation for connection errors."""

    def __init__(self, core: Http2Core) -> None:
        self._core = core
        self._conn = core.conn
        self._gate = Gate(core.config)
        self._filter = SettingsFilter(core.config.max_settings)
        self._at_once = core.config.frames_at_once
        self._held = Held(core.shared, core.config)
        self._early = Early(core)
        self.unread = False  # whole frames are left: others get their turn before
        self.partial_ns: int | None = None  # when the frame that is incomplete began to come
        self.priorities = Priorities()
        self._last: tuple[Fields | None, bool, Head] = (None, False, _NO_HEAD)
        self.greeted = False  # the client's first SETTINGS are here
        self.handlers = {
            gate.DATA: self._data,
            gate.HEADERS: self._headers,
            gate.RST_STREAM: self._rst_stream,
            gate.SETTINGS: self._settings,
            gate.PUSH_PROMISE: self._push_promise,
            gate.PING: self._ping,
            gate.GOAWAY: self._goaway,
            gate.WINDOW_UPDATE: self._window_update,
            gate.PRIORITY_UPDATE: self._priority_update,
        }

    def receive(self, data: bytes) -> None:
        """Bytes from the client, and the frames that they complete: at most --frames-at-once of them."""
        gate, core, handlers = self._gate, self._core, self.handlers
        self.unread = False
        gate.feed(data)
        count = 0
        for frame in islice(gate.frames(), self._at_once):
            handlers.get(frame.type, self._dropped)(frame)
            count += 1
        if count == self._at_once:
            self.unread = True
            core.shared.hit("frames_at_once")
        self._early.ask()
        if not gate.partial:
            if self.partial_ns is not None:
                self.partial_ns = None
                self._held.note(0)
            return
        self._held.note(gate.held)
        if count or self.partial_ns is None:
            self.partial_ns = core.now_ns
            core.arm(core.now_ns + to_ns(core.config.header_timeout_s))

    def release(self) -> None:
        """The connection is gone."""
        self._held.note(0)
        self.handlers.clear()
        self._early.clear()

    # --- requests ---

    def _headers(self, frame: Frame) -> None:
        sid = frame.sid
        if not sid & 1:
            raise Violation(code.PROTOCOL_ERROR, "HEADERS on a stream that the client may not open")
        if sid <= self._conn.highest_inbound_stream_id:
            stream = self._core.streams.get(sid)
            if stream is not None and stream.state in (State.RECEIVING, State.EARLY, State.LINGERING):
                self._trailers(stream, frame)
            else:
                self._late_headers(frame)
            return
        fields: Fields | None
        try:
            fields = self._conn.decode(frame.block)
        except OversizedList:
            fields = None
        ended = bool(frame.flags & gate.END_STREAM)
        core = self._core
        stream = Stream(core, self._conn.open_request(sid, ended=ended), core.now_ns)
        core.streams[sid] = stream
        core.shared.streams += 1
        if ended:
            stream.move(Input.END)
        own = len(core.streams) - len(core.pushes.table.open)
        if core.draining or core.shared.no_stream(own, core.config):
            self._refuse(stream)
        elif fields is None:
            core.answer(stream, HeadersTooLarge("the header list is too large"))
        else:
            self._request(stream, fields, ended=ended)

    def _refuse(self, stream: Stream) -> None:
        """RFC 9113 5.1.2 and 8.7: not processed, may be sent again. A first burst before the client has seen our
        limit is innocent."""
        core = self._core
        core.shared.refused += 1
        core.break_stream(stream, code.REFUSED_STREAM, "")
        if core.settings_acked and not core.draining:
            core.spend_reset()
        else:
            spend(core, "refused_streams")

    def _request(self, stream: Stream, fields: Fields, *, ended: bool) -> None:
        core = self._core
        if fields is self._last[0] and ended is self._last[1]:
            parsed = self._last[2]  # the decoder remembers blocks: the same list is the same request head
        else:
            try:
                parsed = parse(fields, peer=core.peer, ended=ended)
            except Malformed:
                self._malformed(stream)
                return
            self._last = (fields, ended, parsed)
        head = parsed.head
        stream.head = self.priorities.opened(stream, head)
        stream.length = parsed.length
        stream.no_body = head.method == "HEAD"
        stream.head_bytes = parsed.size
        core.shared.header_bytes += parsed.size
        refusal = self._early.refusal(parsed)
        if refusal is not None:
            core.answer(stream, refusal)
        elif ended:
            core.ready.append(stream)
        else:
            self._early.expect(stream, parsed)

    def _malformed(self, stream: Stream) -> None:
        """RFC 9113 8.1.1: a stream error, and the peer made us reset."""
        self._core.break_stream(stream, code.PROTOCOL_ERROR, "protocol_error")
        self._core.spend_reset()

    def _trailers(self, stream: Stream, frame: Frame) -> None:
        try:
            fields = self._conn.decode(frame.block)
        except OversizedList:
            fields = [(b":", b"")]  # malformed
        ended = bool(frame.flags & gate.END_STREAM)
        try:
            if not ended:
                raise Malformed("trailers without END_STREAM")
            check_trailers(fields)
        except Malformed:
            self._malformed(stream)
            return
        self._conn.trailers(stream.h2)
        self._ended(stream)

    def _late_headers(self, frame: Frame) -> None:
        """On a stream whose request is complete or that is closed: h2 knows which error that is."""
        spend(self._core, "late_frames")
        block = frame.block
        flags = gate.END_HEADERS | frame.flags & gate.END_STREAM
        if len(block) > MAX_FRAME:
            raise Violation(code.STREAM_CLOSED, "HEADERS on a closed stream")
        self._stock(gate.HEADER.pack(len(block) >> 8, len(block) & 0xFF, gate.HEADERS, flags, frame.sid) + block)

    def _data(self, frame: Frame) -> None:
        core = self._core
        stream = core.streams.get(frame.sid)
        ended = bool(frame.flags & gate.END_STREAM)
        if stream is None or stream.state is State.ANSWERING:
            if self._conn.is_idle(frame.sid):
                raise Violation(code.PROTOCOL_ERROR, "DATA on an idle stream")
            spend(self._core, "late_frames")
            self._stock(frame.raw)
            return
        payload = gate.strip_padding(frame.raw, frame.flags)
        if len(payload) < core.budgets.tiny and not ended:
            spend(self._core, "control_frames")
        self._conn.body(stream.h2, len(frame.raw) - 9, ended=ended)
        stream.seen_ns = core.now_ns
        if stream.state is State.RECEIVING and not self._keep(stream, payload):
            return
        if stream.state is State.LINGERING and self._had_enough(stream, payload):
            return
        if ended:
            self._ended(stream)

    def _keep(self, stream: Stream, payload: bytes) -> bool:
        """Store a piece of the body. False if the stream is over, or answered already."""
        core = self._core
        stream.received += len(payload)
        if stream.length is not None and stream.received > stream.length:
            self._malformed(stream)
            return False
        if payload:
            try:
                stream.store(payload)
            except OSError:
                core.answer(stream, Overloaded("no memory for the request's body", retry_after_s=1.0))
        if stream.received > core.config.max_body_bytes:
            core.answer(stream, self._early.too_large())
        elif core.shared.body_bytes > core.config.max_buffered_body_bytes:
            core.answer(stream, Overloaded("too many request bodies at once", code=TOO_MANY_BODIES, retry_after_s=1.0))
        return stream.state is not State.CLOSED

    def _had_enough(self, stream: Stream, payload: bytes) -> bool:
        """A body that nobody wants any more is thrown away as it comes, but not without end."""
        stream.received += len(payload)
        if stream.received <= self._core.config.discard_bytes:
            return False
        self._core.shared.hit("unwanted_body")
        self._core.break_stream(stream, code.NO_ERROR, "")
        return True

    def _ended(self, stream: Stream) -> None:
        if stream.state is State.RECEIVING and stream.length not in (None, stream.received):
            self._malformed(stream)
            return
        action = stream.move(Input.END)
        if action is Action.HAND_OVER:
            self._core.ready.append(stream)
        elif action is Action.FINISH:
            self._core.forget(stream)

    # --- control ---

    def _rst_stream(self, frame: Frame) -> None:
        if self._conn.is_idle(frame.sid):
            raise Violation(code.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        self._stock(frame.raw)
        self._core.spend_reset()

    def _settings(self, frame: Frame) -> None:
        spend(self._core, "control_frames", SETTINGS_COST)
        if frame.flags & gate.ACK:
            self._stock(frame.raw)
            return
        self.greeted = True
        raw, entries = self._filter(frame.raw)
        core = self._core
        if gate.HEADER_TABLE_SIZE in entries:
            core.outbox.table_update = NO_TABLE
        if gate.INITIAL_WINDOW_SIZE not in entries:
            self._stock(raw)
            return
        self._conn.purge()  # h2 would let a closed stream's window overflow
        rows = core.rows
        if rows is not None:
            rows.before_window_frame(core, 0)
        self._stock(raw)
        for stream in core.streams.values():
            if stream.buffered:
                core.outbox.add(stream)
        if rows is not None:
            rows.after_window_frame(core, 0)

    def _push_promise(self, frame: Frame) -> None:
        raise Violation(code.PROTOCOL_ERROR, "a client cannot push")

    def _ping(self, frame: Frame) -> None:
        spend(self._core, "control_frames")
        if frame.flags & gate.ACK and frame.raw[9:] == farewell.PING:
            self._core.farewell.heard = True
        self._stock(frame.raw)

    def _goaway(self, frame: Frame) -> None:
        spend(self._core, "control_frames")
        self._stock(frame.raw)
        self._core.peer_leaving = True

    def _window_update(self, frame: Frame) -> None:
        core, sid = self._core, frame.sid
        core.budgets.window.give(core.budgets.credit * core.row_frames)
        core.row_frames = 0
        spend(core, "window_updates")
        if sid and self._conn.is_idle(sid):
            raise Violation(code.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
        stream = core.streams.get(sid) if sid else None
        rows = core.rows if sid == 0 or (stream is not None and stream.on_rows) else None
        if rows is not None:
            rows.before_window_frame(core, sid)
        self._stock(frame.raw)
        if stream is not None and stream.buffered:
            core.outbox.add(stream)
        if rows is not None:
            rows.after_window_frame(core, sid)

    def _priority_update(self, frame: Frame) -> None:
        spend(self._core, "control_frames")
        self.priorities.update(self._core, frame)

    def _dropped(self, frame: Frame) -> None:
        """PRIORITY (deprecated, RFC 9113 5.3.2), ALTSVC and ORIGIN (not from clients), unknown types (5.5)."""
        spend(self._core, "control_frames")

    # --- inside ---

    def _stock(self, raw: bytes) -> None:
        """Let h2 have the frame, and follow what it says."""
        core = self._core
        core.outbox.pull()
        for event in self._conn.feed(raw):
            if isinstance(event, StreamReset):
                stream = core.streams.get(event.stream_id)
                if event.remote_reset:
                    if stream is not None:
                        core.close_stream(stream, Input.RESET, "client_reset")
                else:  # MadeYouReset: h2 has reset the stream because of this frame
                    if stream is not None:
                        core.break_stream(stream, code.STREAM_CLOSED, "protocol_error")
                    core.spend_reset()
            elif isinstance(event, SettingsAcknowledged):
                core.settings_acked = True
                self._conn.acknowledged(core.config)
