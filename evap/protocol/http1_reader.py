"""Bytes of one HTTP/1.1 connection -> its requests, one after the other, within the limits."""

from __future__ import annotations

from typing import Final

from evap.config import ProtocolConfig
from evap.errors import BodyTooLarge, Draining, EvapError, Overloaded, RequestTimeout
from evap.protocol.http1_parse import (
    HEAD_END,
    ChunkedBody,
    FixedBody,
    Head,
    Refused,
    check_partial,
    read_head,
    request_head,
)
from evap.protocol.limits import TOO_MANY_BODIES, Shared, to_ns
from evap.protocol.spool import Body, Spool

_NO_BODY: Final = FixedBody(0)
#: A body longer than this is not taken from who may not send it. For less, his connection is not worth ending.
EARLY_BYTES: Final = 64 << 10


class RequestReader:
    """`feed` bytes, then ask `next` once per request that may be handed over.

    head: of the request whose body is being read (or was refused), else None.
    Body bytes are counted in `shared.body_bytes` until `next` gives them away or `clear` drops them.
    """

    __slots__ = (
        "_body", "_body_bytes", "_config", "_early", "_full", "_may_skip", "_parts", "_scanned", "_shared", "_since_ns",
        "_spool", "_waits", "head", "pending", "served",
    )  # fmt: skip

    def __init__(self, config: ProtocolConfig, shared: Shared, now_ns: int) -> None:
        self.pending = bytearray()  #: what was received and not yet read
        self.head: Head | None = None
        self.served = 0
        self._config = config
        self._shared = shared
        self._scanned = 0  # bytes of an incomplete head that check_partial has seen
        self._body: FixedBody | ChunkedBody = _NO_BODY
        self._parts: list[bytes] = []
        self._spool: Spool | None = None  # instead of parts, for a large body
        self._body_bytes = 0
        self._full = False  # the system has no memory for this body
        self._may_skip = True  # an empty line before the next head
        self._waits = False  # for 100 Continue
        self._early = False  # it is to be asked whether the body is wanted
        self._since_ns = now_ns  # when the present wait began

    @property
    def idle(self) -> bool:
        """Between requests."""
        return self.head is None and not self.pending

    def feed(self, data: bytes, now_ns: int) -> None:
        if self.head is not None or not self.pending:
            self._since_ns = now_ns
        taken = self._body.direct(len(data)) if not self.pending else 0
        if taken:
            self._keep(data[:taken])
            data = data[taken:]
        self.pending += data

    def wait(self, now_ns: int) -> None:
        """The wait for the next request begins."""
        self._since_ns = now_ns

    @property
    def deadline_ns(self) -> int:
        """When the present wait ends: for the next request, the rest of a head, or the next byte of a body."""
        config = self._config
        if self.head is not None:
            return self._since_ns + to_ns(config.body_timeout_s)
        if self.pending:
            return self._since_ns + to_ns(config.header_timeout_s)
        return self._since_ns + to_ns(config.idle_timeout_s if self.served else config.preface_timeout_s)

    def expire(self) -> None:
        """The deadline has passed. Raises Refused when a request had begun; else the connection has just idled."""
        if not self.idle:
            part = "body" if self.head is not None else "head"
            raise Refused(RequestTimeout(f"the request's {part} did not arrive in time"))

    def next(self, now_ns: int) -> tuple[Head, Body] | None:
        """The next request, if all of it is here. Raises Refused; nothing more can be read then."""
        if self.head is None:
            self._take_head(now_ns)
        if self.head is None:
            return None
        for part in self._body.feed(self.pending):
            self._keep(part)
        if self._full or self._shared.body_bytes > self._config.max_buffered_body_bytes:
            raise Refused(Overloaded("too many request bytes at once", code=TOO_MANY_BODIES, retry_after_s=1))
        if not self._body.done:
            return None
        request: tuple[Head, Body] = self.head, self._spool or b"".join(self._parts)
        self._spool = None
        self.served += 1
        self._forget()
        return request

    def refusal(self, scheme: str, peer: str) -> EvapError | None:
        """Why a body that is large, of no known length, or waits for 100 is not wanted: asked once, before it comes."""
        early, self._early = self._early, False
        if not early or self.head is None or self._shared.admit is None:
            return None
        return self._shared.admit(request_head(self.head, scheme=scheme, peer=peer))

    def take_continue(self) -> bool:
        """The client waits for 100 before it sends the body, and has not begun (RFC 9110 10.1.1). True once."""
        waits, self._waits = self._waits and not self._body_bytes, False
        return waits

    def clear(self) -> None:
        self.pending.clear()
        self._forget()

    def _take_head(self, now_ns: int) -> None:
        pending, config = self.pending, self._config
        if self._may_skip and pending.startswith(b"\r"):
            if len(pending) == 1:
                return
            if pending.startswith(b"\r\n"):
                del pending[:2]  # RFC 9112 2.2: some clients end a body with one CRLF too many
                self._may_skip = False
        if not pending:
            return
        end = pending.find(HEAD_END, max(0, self._scanned - 3))
        if end < 0:
            check_partial(pending, self._scanned, config.max_header_list_bytes, config.max_request_line_bytes)
            self._scanned = len(pending)
            return
        raw = bytes(memoryview(pending)[: end + 4])
        del pending[: end + 4]
        self._scanned, self._may_skip, self._since_ns = 0, True, now_ns
        limits = config.max_headers, config.max_header_list_bytes, config.max_request_line_bytes
        self.head = head = read_head(raw, *limits)
        limit = config.max_body_bytes
        if self._shared.draining:
            raise Refused(draining())
        if (head.length or 0) > limit:
            raise Refused(BodyTooLarge(f"the request body is larger than {limit} bytes"))
        self._waits = head.expects_continue and not pending
        self._early = self._waits or head.length is None or head.length > EARLY_BYTES
        self._body = ChunkedBody(limit, config.max_tiny_chunks) if head.length is None else FixedBody(head.length)

    def _keep(self, part: bytes) -> None:
        self._body_bytes += len(part)
        try:
            if self._spool is not None:
                self._spool.write(part)
                return
            self._parts.append(part)
            self._shared.body_bytes += len(part)
            if self._body_bytes > self._shared.spool_over:
                self._spool = Spool(self._shared, self._parts)
                self._parts = []
        except OSError:
            self._full = True  # said by `next`

    def _forget(self) -> None:
        self._shared.body_bytes -= sum(map(len, self._parts))
        if self._spool is not None:
            self._spool.close()
        self.head, self._body, self._parts, self._spool = None, _NO_BODY, [], None
        self._body_bytes, self._full = 0, False


def draining() -> Draining:
    return Draining("the server is shutting down", retry_after_s=1)
