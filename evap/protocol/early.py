"""What is said of an HTTP/2 request before its body is here: that it is refused, or 100 Continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evap.errors import BodyTooLarge, EvapError, Overloaded
from evap.protocol.hpack_out import CONTINUE
from evap.protocol.limits import TOO_MANY_HEADERS, to_ns
from evap.protocol.request_head import Head
from evap.protocol.stream import State, Stream

if TYPE_CHECKING:
    from evap.protocol.connection import Http2Core


class Early:
    """Of one connection. `Shared.admit` is asked at the end of a read, of requests whose body has yet to come then: one
    that came whole is judged once, when it is handed over."""

    __slots__ = ("_core", "_new")

    def __init__(self, core: Http2Core) -> None:
        self._core = core
        self._new: list[tuple[Stream, bool]] = []  # their heads came with this read; whether 100 Continue is awaited

    def refusal(self, parsed: Head) -> EvapError | None:
        """What needs no more than the head and the limits of the wire."""
        config, shared = self._core.config, self._core.shared
        if parsed.refusal is not None:
            return parsed.refusal
        if parsed.length is not None and parsed.length > config.max_body_bytes:
            return self.too_large()
        if shared.header_bytes > config.max_buffered_header_bytes:
            return Overloaded("too many request headers at once", code=TOO_MANY_HEADERS, retry_after_s=1.0)
        return None

    def too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._core.config.max_body_bytes} bytes")

    def expect(self, stream: Stream, parsed: Head) -> None:
        """The head is in order, and a body follows."""
        self._core.arm(self._core.now_ns + to_ns(self._core.config.body_timeout_s))
        self._new.append((stream, parsed.wants_continue))

    def ask(self) -> None:
        """The read is over."""
        new, self._new = self._new, []
        core = self._core
        admit = core.shared.admit
        for stream, wants_continue in new:
            if stream.state is not State.RECEIVING or stream.head is None:
                continue  # it is whole, reset, or answered
            refusal = admit(stream.head) if admit is not None else None
            if refusal is not None:
                core.answer(stream, refusal)
            elif wants_continue and not stream.received:  # RFC 9110 10.1.1: not needed once the body has begun
                core.outbox.head(stream, CONTINUE, end=False, informational=True)

    def clear(self) -> None:
        self._new.clear()
