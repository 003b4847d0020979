"""The half of Http2Core that the row buffers use: events.RowCore."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evap.protocol.events import Reply, RowsHost
    from evap.protocol.h2seam import ServerConnection
    from evap.protocol.limits import WriteProgress
    from evap.protocol.outbox import Outbox
    from evap.protocol.push import Pushes
    from evap.protocol.stream import Stream


class RowSeam:
    """What it finds in the core stands first."""

    conn: ServerConnection
    outbox: Outbox
    pushes: Pushes
    streams: dict[int, Stream]
    writes: WriteProgress
    rows: RowsHost | None
    direct: Callable[[bytes | memoryview], int] | None
    row_frames: int
    high_water: int
    _closing: bool

    def _notify(self) -> None:
        raise NotImplementedError

    def leave_rows(self, stream: Stream) -> None:
        if stream.on_rows:
            stream.on_rows = False
            if self.rows is not None:
                self.rows.release(stream)

    @property
    def connection_window(self) -> int:
        return self.conn.outbound_flow_control_window

    @property
    def writable(self) -> bool:
        return not self._closing and self.writes.queued + self.outbox.size < self.high_water

    def acquire(self, reply: Reply) -> int | None:
        stream = self.streams.get(reply.stream_id)
        if stream is not reply or not stream.alive or not stream.started or stream.no_body or stream.buffered:
            return None
        stream.on_rows = True
        return stream.h2.outbound_flow_control_window

    def on_rows(self, stream_id: int, on: bool) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.on_rows = on

    def stream_window(self, stream_id: int) -> int:
        stream = self.streams.get(stream_id)
        return stream.h2.outbound_flow_control_window if stream is not None else 0

    def spend(self, stream_id: int, n: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.h2.outbound_flow_control_window -= n

    def take_rows(self, data: bytes | memoryview, frames: int, charge: int) -> bool:
        conn, outbox = self.conn, self.outbox
        if conn.outbound_flow_control_window < charge or not self.writable:
            return False
        if self.pushes.busy and not self.pushes.take_rows(data, frames, charge):
            return False
        conn.outbound_flow_control_window -= charge
        self.row_frames += frames
        outbox.pull()
        if self.direct is None or outbox.out or outbox.pending or self.writes.queued:
            outbox.append(data)
            self._notify()
        elif self.direct(data):
            self.writes.given(len(data))
            self._notify()  # for `written` to hear what is queued
        return True
