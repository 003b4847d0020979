"""RFC 9218 on one HTTP/2 connection: which urgency a stream has, and what a PRIORITY_UPDATE changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from evap.protocol import headers as code
from evap.protocol.events import PriorityChanged, RequestHead
from evap.protocol.gate import Frame, Violation
from evap.protocol.priority import parse

if TYPE_CHECKING:
    from evap.protocol.connection import Http2Core
    from evap.protocol.stream import Stream

#: Bytes of a field value that are kept.
MAX_KEPT: Final = 64


class Priorities:
    """waiting: updates for streams that are still idle; as many as the client may open."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: dict[int, bytes] = {}

    def opened(self, stream: Stream, head: RequestHead) -> RequestHead:
        """A request has come; its head, with the update that came before it in place of its field (section 7)."""
        early = self.waiting.pop(stream.stream_id, None) if self.waiting else None
        if early is not None:
            head = _with(head, early)
        value = head.get(b"priority")
        if value is not None:
            stream.urgency = parse(value).urgency
        return head

    def update(self, core: Http2Core, frame: Frame) -> None:
        """Section 7.1. Raises Violation; a value that is malformed counts as one that says nothing."""
        sid = int.from_bytes(frame.raw[9:13]) & 0x7FFFFFFF
        if sid == 0:
            raise Violation(code.PROTOCOL_ERROR, "PRIORITY_UPDATE for stream 0")
        value = frame.raw[13 : 13 + MAX_KEPT]
        stream = core.streams.get(sid)
        if stream is not None:
            core.outbox.move(stream, parse(value).urgency)
            if stream.delivered:
                core.events.append(PriorityChanged(stream, value))
            elif stream.head is not None:  # nobody has the request yet
                stream.head = _with(stream.head, value)
        elif core.conn.is_idle(sid) and len(self.waiting) < core.config.max_concurrent_streams:
            self.waiting[sid] = value


def _with(head: RequestHead, value: bytes) -> RequestHead:
    return replace(head, index={**head.index, b"priority": value})
