"""The only importer of h2, and everything we do to it beyond its public calls.

h2 owns the connection: state machines, windows, settings, closed streams. It is pinned (4.4.x), and each seam below is
held against stock h2 by `tests/protocol/test_h2seam.py`, byte for byte and state for state. The seams, and why:

B  GOAWAY from the client ends nothing by itself (RFC 9113 6.8; h2 issue 1181): four transitions.
C  More streams than we advertise are refused one by one (RFC 9113 5.1.2), so h2's own limit must lie above ours.
E  DATA out: header bytes and two windows instead of send_data's copies (1.4 us instead of 7).
F  HEADERS and PUSH_PROMISE out: blocks that are encoded already (2 us instead of 16; h2's encoder is not used at all).
G  HEADERS in for a new stream, and DATA in: the same transitions as h2's `receive_headers` and `receive_data`,
   without frame objects and events (5 us instead of 27, 3 us instead of 13). Anything else goes through receive_data.
H  DATA on a stream that we have reset is ignored (RFC 9113 5.1); h2 would reset it again for each frame on its way.
"""

from __future__ import annotations

from typing import Any, Final

from h2.config import H2Configuration
from h2.connection import ConnectionInputs, ConnectionState, H2Connection, H2ConnectionStateMachine
from h2.events import Event, SettingsAcknowledged, StreamReset
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream, StreamClosedBy, StreamInputs
from hpack.exceptions import HPACKError, InvalidTableSizeError, OversizedHeaderListError

from evap.config import ProtocolConfig
from evap.protocol import headers as code
from evap.protocol.gate import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADERS,
    NO_RFC7540_PRIORITIES,
    PREFACE,
    PUSH_PROMISE,
    Violation,
)
from evap.protocol.hpack_in import Fields, RequestDecoder
from evap.protocol.limits import MAX_FRAME

__all__ = ["Event", "H2Stream", "ServerConnection", "SettingsAcknowledged", "StreamReset"]

INITIAL_WINDOW: Final = 65_535
INITIAL_TABLE: Final = 4096
MAX_STREAM_ID: Final = (1 << 31) - 1
#: Streams are purged from h2's table after this many closed (h2 itself walks all of them for each new stream).
PURGE_EVERY: Final = 64

_CONFIG: Final = H2Configuration(
    client_side=False,
    header_encoding=None,
    validate_inbound_headers=False,  # evap.protocol.request_head, as stream errors
    normalize_inbound_headers=False,
    validate_outbound_headers=False,  # evap.protocol.headers.vet_field
    normalize_outbound_headers=False,
)

_OPEN, _IDLE = ConnectionState.SERVER_OPEN, ConnectionState.IDLE
_C, _S = ConnectionInputs, StreamInputs


class DrainMachine(H2ConnectionStateMachine):
    """Seam B: GOAWAY in either direction leaves the connection as it is; streams end by themselves."""

    _transitions = H2ConnectionStateMachine._transitions | {
        (_OPEN, _C.RECV_GOAWAY): (None, _OPEN),
        (_OPEN, _C.SEND_GOAWAY): (None, _OPEN),
        (_IDLE, _C.RECV_GOAWAY): (None, _IDLE),
        (_IDLE, _C.SEND_GOAWAY): (None, _IDLE),
    }


class LenientSettings(Settings):
    """Seam C: advertises max_concurrent_streams, and does not enforce it."""

    @property
    def max_concurrent_streams(self) -> int:
        return 1 << 31

    @max_concurrent_streams.setter
    def max_concurrent_streams(self, value: int) -> None:
        self[SettingCodes.MAX_CONCURRENT_STREAMS] = value


class ServerConnection(H2Connection):
    """h2's connection with the seams. All methods raise Violation where h2 raises ProtocolError."""

    MAX_CLOSED_STREAMS = 512

    def __init__(self, config: ProtocolConfig) -> None:
        super().__init__(_CONFIG)
        self.state_machine = DrainMachine()
        self.local_settings = LenientSettings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: config.max_concurrent_streams,
                SettingCodes.HEADER_TABLE_SIZE: config.hpack_table_bytes,
                SettingCodes.INITIAL_WINDOW_SIZE: config.stream_window_bytes,
                SettingCodes.MAX_HEADER_LIST_SIZE: config.max_header_list_bytes,
                NO_RFC7540_PRIORITIES: 1,  # type: ignore[dict-item]  # RFC 9218 2.1; h2 passes unknown ids on
            },
        )
        self.request_decoder = RequestDecoder(
            config.max_header_list_bytes, config.max_headers, factor=config.header_list_factor,
            table=max(INITIAL_TABLE, config.hpack_table_bytes),  # a smaller one holds from the acknowledgement on
        )  # fmt: skip
        self.decoder = self.request_decoder
        self._closed_since_purge = 0
        self.initiate_connection()
        if config.connection_window_bytes > INITIAL_WINDOW:
            self.increment_flow_control_window(config.connection_window_bytes - INITIAL_WINDOW)
        super().receive_data(PREFACE)

    def release(self) -> None:
        """The connection is gone: h2's table of its own methods would keep it for the collector."""
        self._frame_dispatch_table.clear()

    def clear_outbound_data_buffer(self) -> None:
        """h2 forgets unsent output on GOAWAY; what is queued is still owed (seam B)."""

    def feed(self, raw: bytes) -> list[Event]:
        """One whole frame, the stock way."""
        try:
            return self.receive_data(raw)
        except ProtocolError as error:
            self.data_to_send()  # h2's own GOAWAY; ours has a better code and a reason
            raise Violation(int(error.error_code), type(error).__name__) from error

    def _handle_data_on_closed_stream(self, events: list[Event], exc: Any, frame: Any) -> tuple[list[Any], list[Event]]:
        """Seam H. h2 has credited the connection's window; only the first reset has events."""
        frames, found = super()._handle_data_on_closed_stream(events, exc, frame)
        if not exc._events and self._stream_closed_by(exc.stream_id) is StreamClosedBy.SEND_RST_STREAM:
            frames.pop()
        return frames, found

    def _connection(self, event: ConnectionInputs) -> None:
        """In SERVER_OPEN, HEADERS and DATA change nothing: no need to ask (10 look-ups a request)."""
        if self.state_machine.state is not _OPEN:
            self.state_machine.process_input(event)

    # --- in ---

    def acknowledged(self, config: ProtocolConfig) -> None:
        """Our SETTINGS hold: the client's next block says it if its table has to shrink (RFC 7541 4.2)."""
        self.request_decoder.limit_table(config.hpack_table_bytes)

    def decode(self, block: bytes) -> Fields:
        """Raises OversizedList (the context is intact), or Violation."""
        try:
            return self.request_decoder.fields(block)
        except OversizedHeaderListError as error:
            raise Violation(code.ENHANCE_YOUR_CALM, "header list far over the limit", "header_list") from error
        except InvalidTableSizeError as error:
            raise Violation(code.COMPRESSION_ERROR, "HPACK table over the limit", "hpack_table") from error
        except HPACKError as error:
            raise Violation(code.COMPRESSION_ERROR, "header block cannot be decoded") from error

    def open_request(self, sid: int, *, ended: bool) -> H2Stream:
        """Seam G, after `decode`: HEADERS on a stream id that is odd and higher than any before."""
        self._connection(_C.RECV_HEADERS)
        stream = self._new(sid)
        self.highest_inbound_stream_id = sid
        stream.state_machine.process_input(_S.RECV_HEADERS)
        if ended:
            stream.state_machine.process_input(_S.RECV_END_STREAM)
        return stream

    def _new(self, sid: int) -> H2Stream:
        stream = H2Stream(
            sid,
            config=self.config,
            inbound_window_size=self.local_settings.initial_window_size,
            outbound_window_size=self.remote_settings.initial_window_size,
        )
        stream.max_outbound_frame_size = self.max_outbound_frame_size
        self.streams[sid] = stream
        return stream

    def trailers(self, stream: H2Stream) -> None:
        """Seam G: trailing HEADERS with END_STREAM on a stream whose body was coming."""
        self._connection(_C.RECV_HEADERS)
        stream.state_machine.process_input(_S.RECV_HEADERS)
        stream.state_machine.process_input(_S.RECV_END_STREAM)

    def body(self, stream: H2Stream, size: int, *, ended: bool) -> None:
        """Seam G: DATA of `size` flow-controlled octets on a stream whose body was coming; credited at once."""
        try:
            self._connection(_C.RECV_DATA)
            self._inbound_flow_control_window_manager.window_consumed(size)
            stream.state_machine.process_input(_S.RECV_DATA)
            stream._inbound_window_manager.window_consumed(size)
        except ProtocolError as error:
            raise Violation(int(error.error_code), type(error).__name__) from error
        if ended:
            stream.state_machine.process_input(_S.RECV_END_STREAM)
        if size:
            self.acknowledge_received_data(size, stream.stream_id)

    def is_idle(self, sid: int) -> bool:
        """Never opened, by the client or by us."""
        return sid > (self.highest_inbound_stream_id if sid & 1 else self.highest_outbound_stream_id)

    # --- out; the caller has taken `data_to_send()` before, so that order is kept ---

    def head(self, stream: H2Stream, block: bytes, *, end: bool, informational: bool = False) -> bytes:
        """Seam F: HEADERS (and CONTINUATIONs) with an encoded block: a response head, 1xx, or trailers."""
        self._connection(_C.SEND_HEADERS)
        inputs = stream.state_machine.process_input
        inputs(_S.SEND_INFORMATIONAL_HEADERS if informational else _S.SEND_HEADERS)
        if end:
            inputs(_S.SEND_END_STREAM)
        flags = END_STREAM if end else 0
        size = len(block)
        if size <= MAX_FRAME:
            return HEADER.pack(size >> 8, size & 0xFF, HEADERS, flags | END_HEADERS, stream.stream_id) + block
        frames = [HEADER.pack(MAX_FRAME >> 8, MAX_FRAME & 0xFF, HEADERS, flags, stream.stream_id), block[:MAX_FRAME]]
        for at in range(MAX_FRAME, size, MAX_FRAME):
            part = block[at : at + MAX_FRAME]
            last = END_HEADERS if at + MAX_FRAME >= size else 0
            frames += (HEADER.pack(len(part) >> 8, len(part) & 0xFF, CONTINUATION, last, stream.stream_id), part)
        return b"".join(frames)

    def promise(self, parent: H2Stream, block: bytes) -> tuple[H2Stream, bytes]:
        """Seam F: the stream that is reserved for the promised answer, and the PUSH_PROMISE frame (RFC 9113 6.6). The
        caller has asked `remote_settings`, and that the parent is open; the block has less than MAX_FRAME octets."""
        sid = self.highest_outbound_stream_id + 2
        self._connection(_C.SEND_PUSH_PROMISE)
        parent.state_machine.process_input(_S.SEND_PUSH_PROMISE)
        stream = self._new(sid)
        self.highest_outbound_stream_id = sid
        stream.state_machine.process_input(_S.SEND_PUSH_PROMISE)
        size = len(block) + 4
        header = HEADER.pack(size >> 8, size & 0xFF, PUSH_PROMISE, END_HEADERS, parent.stream_id)
        return stream, header + sid.to_bytes(4) + block

    def data_header(self, stream: H2Stream, size: int, *, end: bool) -> bytes:
        """Seam E: the nine octets before `size` octets of DATA. size <= both windows (or 0) and <= MAX_FRAME."""
        self._connection(_C.SEND_DATA)
        inputs = stream.state_machine.process_input
        inputs(_S.SEND_DATA)
        if end:
            inputs(_S.SEND_END_STREAM)
        stream.outbound_flow_control_window -= size
        self.outbound_flow_control_window -= size
        return HEADER.pack(size >> 8, size & 0xFF, DATA, END_STREAM if end else 0, stream.stream_id)

    def reset(self, stream: H2Stream, error: int) -> None:
        if not stream.closed:
            self.reset_stream(stream.stream_id, error)

    def announce_goaway(self, ping: bytes) -> None:
        """GOAWAY that accepts everything (RFC 9113 6.8); a PING before it: clients made with h2 take none after."""
        self.ping(ping)
        self.close_connection(0, last_stream_id=MAX_STREAM_ID)

    def goaway(self, error: int, reason: str) -> None:
        self.close_connection(error, additional_data=reason.encode() or None)

    def closed_one(self) -> None:
        """A stream has closed: now and then let h2 move closed ones to its bounded memory of them."""
        self._closed_since_purge += 1
        if self._closed_since_purge >= PURGE_EVERY:
            self.purge()

    def purge(self) -> None:
        self._closed_since_purge = 0
        _ = self.open_inbound_streams  # its side effect is the purge
