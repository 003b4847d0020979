"""What an answer says of itself at its end: its usage as trailer fields, and, when it is asked for, its times.

A request with `evap-timing: 1` gets `server-timing` (W3C Server Timing, durations in ms): in the head of a whole
answer, in the trailer section of a stream whose client takes trailers, and as a comment before `data: [DONE]`. Trailers
go to HTTP/2 clients that send `te: trailers` and to nobody else: over HTTP/1.1 most intermediaries and clients lose
them (RFC 9110 section 6.5.1), while a comment reaches whoever reads the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from evap.protocol.api import usage
from evap.protocol.events import HeaderList

if TYPE_CHECKING:
    from evap.exchange import Exchange

ASKED: Final = b"evap-timing"
FIELD: Final = b"server-timing"


def timing(exchange: Exchange) -> bytes:
    """`queue;dur=0.2, ttft;dur=35.1, total;dur=80.3`: until the engine had it, its first token, its last token; all
    from when the whole request was here. b"" when nobody asked."""
    if exchange.head.get(ASKED) != b"1":
        return b""
    stamps = (("queue", exchange.submitted_ns), ("ttft", exchange.first_ns), ("total", exchange.last_ns))
    parts = [f"{name};dur={(at - exchange.opened_ns) / 1e6:.3f}" for name, at in stamps if at]
    if exchange.trace is not None:
        parts.append(f'traceparent;desc="{exchange.trace.traceparent}"')
    return ", ".join(parts).encode()


def headers(exchange: Exchange) -> HeaderList:
    """For the head of a whole answer."""
    value = timing(exchange)
    return ((FIELD, value),) if value else ()


def comment(exchange: Exchange) -> bytes:
    """For the end of an event stream."""
    value = timing(exchange) if exchange.kind == "sse" else b""
    return b": %b %b\n\n" % (FIELD, value) if value else b""


def takes_trailers(exchange: Exchange) -> bool:
    """Whether its client does (RFC 9110 6.5.1)."""
    return exchange.reply.version == "2" and exchange.head.get(b"te") is not None


def trailers(exchange: Exchange) -> HeaderList:
    """Usage as it is once the client has read to its end; nothing for a client that takes no trailers."""
    if not takes_trailers(exchange):
        return ()
    found = exchange.usage()
    given = min(found.emitted, sum(c.marked + c.row_delivered for c in exchange.choices))
    found = msgspec.structs.replace(found, delivered=given)
    return [*usage.trailers(exchange.renderer.id, found, exchange.ending), *headers(exchange)]
