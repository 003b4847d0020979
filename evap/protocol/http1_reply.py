"""One HTTP/1.1 response in the making: RFC 9112 sections 6 and 7, the `Reply` of events.py."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from evap.errors import EvapError, Overloaded
from evap.protocol.events import HeaderList, Keep, Reply
from evap.protocol.headers import error_body, error_headers, vet, wire_code

if TYPE_CHECKING:
    from evap.protocol.http1 import Http1Core

_STATUS_LINES: Final = {s.value: b"HTTP/1.1 %d %s\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
_BODILESS: Final = frozenset((204, 304))  # RFC 9110 15.3.5, 15.4.5


def chunk(data: bytes) -> bytes:
    """`data` as one chunk. Rows are written with exactly this framing: size in hex, CRLF, data, CRLF."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Http1Reply:
    """See `events.Reply`. Everything is written to the core's output at once; the core does the waiting.

    A streamed body is chunked, or delimited by the end of the connection when the client speaks HTTP/1.0.
    """

    __slots__ = ("_bodiless", "_http10", "alive", "buffered", "core", "ended", "keeps", "owner", "started")

    version = "1.1"
    stream_id = 0
    pushable = False

    def __init__(self, core: Http1Core, *, method: str, http10: bool, keeps: bool) -> None:
        self.core = core
        self.owner: object = None
        self.alive = True
        self.buffered = 0
        self.started = False
        self.ended = False  #: completely handed over (not: aborted)
        self.keeps = keeps  #: the connection goes on after this response
        self._http10 = http10
        self._bodiless = method == "HEAD"

    @property
    def streaming(self) -> bool:
        """Chunks may be appended: what rows need."""
        return self.alive and self.started and not self._bodiless and not self._http10

    def start(self, status: int, headers: HeaderList) -> None:
        if not self.alive or self.started:
            return
        vet(headers)
        self._bodiless = self._bodiless or status in _BODILESS
        framing = b"transfer-encoding: chunked\r\n"
        if self._http10:
            framing, self.keeps = b"", False  # only closing can end the body
        elif status in _BODILESS:
            framing = b""
        self._write_head(status, headers, framing)

    def send(self, data: bytes) -> None:
        if not self.alive or not self.started or self._bodiless or not data:
            return
        self.core.leave_rows(self)
        self.core.emit(data if self._http10 else chunk(data))

    def end(self, trailers: HeaderList = ()) -> None:
        if not self.alive or not self.started:
            return
        self.core.leave_rows(self)
        if not self._bodiless and not self._http10:
            vet(trailers)
            fields = b"".join(b"%b: %b\r\n" % field for field in trailers)
            self.core.emit(b"0\r\n" + fields + b"\r\n")
        self._end()

    def whole(self, status: int, headers: HeaderList, body: bytes) -> None:
        if not self.alive or self.started:
            return
        vet(headers)
        framing = b"" if status in _BODILESS else b"content-length: %d\r\n" % len(body)
        self._write_head(status, headers, framing)
        if body and not self._bodiless and status not in _BODILESS:
            self.core.emit(body)
        self._end()

    def error(self, error: EvapError) -> None:
        """`error` in OpenAI's shape; the connection closes after it."""
        self.keeps = False
        self.whole(wire_code(error)[0], error_headers(error), error_body(error))

    def abort(self) -> None:
        if self.alive:
            self.core.leave_rows(self)
            self.alive = False
            self.core.break_off(self, reset=self._http10 and self.started)

    def push(self, path: bytes, keep: Keep | None) -> Reply | None:
        return None

    def refuse(self) -> None:
        if self.started:
            self.abort()
        else:
            self.error(Overloaded("the request was not processed and may be sent again", retry_after_s=1))

    def _write_head(self, status: int, headers: HeaderList, framing: bytes) -> None:
        self.started = True
        self.keeps = self.keeps and self.core.may_keep()
        connection = b"" if self.keeps else b"connection: close\r\n"
        if self.keeps and self._http10:
            connection = b"connection: keep-alive\r\n"
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        fields = b"".join(b"%b: %b\r\n" % field for field in headers)
        self.core.emit(b"".join((line, fields, framing, connection, self.core.standard_fields(), b"\r\n")))

    def _end(self) -> None:
        self.alive = False
        self.ended = True
