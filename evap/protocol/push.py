"""Server push (RFC 9113 8.4): promised answers beside a running one, on streams of their own.

A request asks for it by a header (the application looks at that); the connection must allow it: ENABLE_PUSH, room in
the client's MAX_CONCURRENT_STREAMS, no GOAWAY from the client, an open parent. A promise is followed by its response
head in the same call: no stream is reserved and waits, so a client that lowers its limit sees nothing new above it.

    parent      PUSH_PROMISE   DATA that names the path
    promised                                              HEADERS   DATA ... END_STREAM

Rules:
1. `PushTable` says who is open, whose, and how often a client did not want one; nothing else is remembered.
2. Pushes leave a reserve of the connection's window: what a client asked for itself does not wait for what it did not.
3. A parent that is reset takes its pushes with it; one that has ended does not.
4. What a push sends is kept in the order in which it was sent, rows included: no copy per token, sorted when there is
   enough of it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from evap.protocol import headers as code
from evap.protocol import hpack_out
from evap.protocol.events import HeaderList, Keep, Reply
from evap.protocol.stream import Input, State, Stream

if TYPE_CHECKING:
    from evap.protocol.connection import Http2Core
    from evap.protocol.h2seam import H2Stream

#: So many promises of one answer may be reset by the client; after that no more are made beside it.
MAX_REFUSED: Final = 2
#: An authority that is longer is not repeated in promises: one of them must fit into a frame (RFC 1035 2.3.4).
MAX_AUTHORITY: Final = 255
#: Octets of sent frames that are held before they are sorted into what is kept of each push.
SORT_BYTES: Final = 64 << 10
MAX_STREAM_ID: Final = (1 << 31) - 1


class PushTable:
    """The promises of one connection, by stream id."""

    __slots__ = ("_limit", "_refused", "busy", "open")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.open: dict[int, int] = {}  #: promised stream -> its parent
        self._refused: dict[int, int] = {}  # open parent with promises -> how many of them the client has reset
        self.busy = False  #: there is something to remember

    def room(self, parent: int, allowed: int) -> bool:
        """allowed: the client's MAX_CONCURRENT_STREAMS, which counts the streams that we open (RFC 9113 5.1.2)."""
        return len(self.open) < min(self._limit, allowed) and self._refused.get(parent, 0) < MAX_REFUSED

    def promised(self, sid: int, parent: int) -> None:
        self.open[sid] = parent
        self._refused.setdefault(parent, 0)
        self.busy = True

    def refused(self, sid: int) -> None:
        """The client has reset it; `closed` follows."""
        parent = self.open[sid]
        if parent in self._refused:
            self._refused[parent] += 1

    def closed(self, sid: int) -> None:
        """A promised stream or a parent is over, however it ended. Others are ignored."""
        self.open.pop(sid, None)
        self._refused.pop(sid, None)
        self.busy = bool(self.open or self._refused)

    def children(self, parent: int) -> list[int]:
        return [sid for sid, other in self.open.items() if other == parent]


class PushedStream(Stream):
    """A promised stream: the Reply to a GET that nobody had to send."""

    __slots__ = ("keep", "parent", "reserve")

    def __init__(self, core: Http2Core, h2: H2Stream, parent: Stream, keep: Keep | None) -> None:
        super().__init__(core, h2, core.now_ns)
        self.state = State.ANSWERING
        self.delivered = True
        self.parent = parent
        self.head, self.urgency = parent.head, parent.urgency  # it is as urgent as what it belongs to
        self.keep = keep
        self.reserve = core.config.push_reserve_bytes

    def start(self, status: int, headers: HeaderList) -> None:
        self.core.outbox.hurry(self.parent)  # the client reads what this is before it comes
        super().start(status, headers)

    def send(self, data: bytes) -> None:
        if self.alive and self.keep is not None:
            self.core.pushes.log(data, 0, self.stream_id)
        super().send(data)


class Pushes:
    """The pushes of one core. `busy`: the core must tell of streams that close, and of rows."""

    def __init__(self, core: Http2Core) -> None:
        self._core = core
        self.table = PushTable(core.config.push_max_promises)
        self._kept: dict[int, Keep] = {}
        self._log: list[tuple[int, int, bytes | memoryview]] = []  # (width of rows or 0, stream or 0, octets)
        self._logged = 0
        self.busy = False

    # Promises

    def possible(self, parent: Stream) -> bool:
        core = self._core
        if not parent.stream_id & 1 or core.peer_leaving or core.closing:
            return False
        theirs = core.conn.remote_settings
        head = parent.head
        return (
            bool(theirs.enable_push)
            and core.shared.streams < core.config.max_open_streams
            and self.table.room(parent.stream_id, theirs.max_concurrent_streams)
            and head is not None
            and 0 < len(head.authority) <= MAX_AUTHORITY
            and core.conn.highest_outbound_stream_id + 2 <= MAX_STREAM_ID
        )

    def promise(self, parent: Stream, path: bytes, keep: Keep | None) -> Reply | None:
        """See events.Reply.push."""
        head = parent.head
        if not parent.started or head is None or not self.possible(parent):
            return None
        core = self._core
        block = hpack_out.promised(head.scheme.encode(), head.authority.encode(), path)
        stream = PushedStream(core, core.outbox.promise(parent, block), parent, keep)
        core.streams[stream.stream_id] = stream
        self.table.promised(stream.stream_id, parent.stream_id)
        self.busy = True
        core.shared.counts["pushed"] += 1
        core.shared.streams += 1
        if keep is not None:
            self._kept[stream.stream_id] = keep
        return stream

    # What the core tells

    def cut(self, stream: Stream, event: Input) -> None:
        """A stream ends early, and is still in the table."""
        core = self._core
        if isinstance(stream, PushedStream):
            if event is Input.RESET:
                core.shared.counts["push_refused"] += 1
                self.table.refused(stream.stream_id)
        elif event is not Input.GONE:
            for sid in self.table.children(stream.stream_id):
                core.break_stream(core.streams[sid], code.CANCEL, "client_reset")

    def closed(self, stream: Stream) -> None:
        """A stream leaves the core's table."""
        self.table.closed(stream.stream_id)
        self.busy = self.table.busy
        keep = self._kept.get(stream.stream_id)
        if keep is None:
            return
        complete = stream.ended and not stream.buffered
        if complete:
            self.sort()
        del self._kept[stream.stream_id]
        keep.close(complete)

    def take_rows(self, data: bytes | memoryview, frames: int, charge: int) -> bool:
        """Rows that are about to be written. False if they would take from the reserve."""
        if not self.table.open:
            return True
        core = self._core
        if core.conn.outbound_flow_control_window - charge < core.config.push_reserve_bytes:
            return False
        if self._kept:
            self.log(data, len(data) // frames, 0)
        return True

    # What is kept

    def log(self, data: bytes | memoryview, width: int, sid: int) -> None:
        """Frames of `width` octets each, or (0) body octets of a stream."""
        self._log.append((width, sid, data))
        self._logged += len(data)
        if self._logged >= SORT_BYTES:
            self.sort()

    def sort(self) -> None:
        """Give each keeper what its stream has sent."""
        log, self._log, self._logged = self._log, [], 0
        for (width, sid), entries in itertools.groupby(log, key=lambda entry: entry[:2]):
            octets = b"".join(data for *_, data in entries)
            if sid:
                if sid in self._kept:
                    self._kept[sid].add(octets)
                continue
            frames = np.frombuffer(octets, np.uint8).reshape(-1, width)
            sids = frames[:, 5:9].copy().view(">u4")[:, 0]
            for kept, keep in self._kept.items():
                mine = frames[sids == kept]
                if len(mine):
                    keep.add(mine[:, 9:].tobytes())
