"""HTTP/1.1 requests as bytes: one head, one chunked body. Ambiguity is refused, never resolved.

Rule 1: llhttp (httptools) reads the head, and only bytes that passed the strict checks here are given to it. What it
        lets through beyond RFC 9112 (two spaces in the request line, `GET / HTTP/2.0`, HTTP/0.9, `ICE/1.0`, fragments,
        trailing blanks in values) is refused or trimmed here; two parsers have to agree before a request exists.
Rule 2: the body is framed here and not by llhttp, which goes on into the next pipelined message without telling
        where the first one ended.
Rule 3: whatever two servers could read differently (smuggling, RFC 9112 11.2) ends the connection.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import httptools

from evap.errors import BodyTooLarge, EvapError, ExpectationFailed, HeadersTooLarge, InvalidRequest
from evap.protocol.events import RequestHead
from evap.protocol.limits import TOO_MANY_CHUNKS

HEAD_END: Final = b"\r\n\r\n"
MAX_CHUNK_LINE_BYTES: Final = 1 << 10
MAX_TRAILER_BYTES: Final = 8 << 10
#: Of chunks below this many bytes there may be so many in one body: framing must not cost more than it is worth.
_SMALL_CHUNK: Final = 64

_AUTHORITY: Final = rb"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(?::[0-9]{0,5})?"
_HOST: Final = re.compile(_AUTHORITY)
# RFC 9112 3.2: origin-form, absolute-form of http and https (no userinfo, RFC 9110 4.2.4), `OPTIONS *`. Authority-form
# is for CONNECT: no proxy, no tunnel.
_ABSOLUTE: Final = re.compile(rb"(?i:https?)://(" + _AUTHORITY + rb")((?:[/?][!\"$-~]*)?)")
_REQUEST_LINE: Final = re.compile(
    rb"(?!CONNECT )(?:[A-Z][A-Z-]{0,31} (?:/[!\"$-~]*|" + _ABSOLUTE.pattern + rb")|OPTIONS \*) HTTP/1\.[01]\r\n"
)
_FIELD_LINE: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*")
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t -~\x80-\xff]*)?")
_HOP_BY_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b"http2-settings", b"te",
     b"trailer", b"expect")
)  # fmt: skip

#: RFC 9110 6.5.1: fields that say where a message ends or goes have no place behind it.
_NO_TRAILERS: Final = frozenset((b"content-length", b"transfer-encoding", b"host"))


class Refused(Exception):
    """The peer's bytes are not a request that can be served; `error` is the answer, then the connection closes."""

    def __init__(self, error: EvapError) -> None:
        super().__init__(error.message)
        self.error = error


def malformed(what: str) -> Refused:
    return Refused(InvalidRequest(f"malformed HTTP/1.1 request: {what}", code="bad_request"))


@dataclass(frozen=True, slots=True)
class Head:
    """A request's head and what follows it. `length` is the body's bytes, or None when it is chunked.

    target: in origin-form, or `*`. headers: lower-case names, without hop-by-hop fields (RFC 9110 7.6.1: they are
    between the peer and this parser). host: an absolute target's, whatever the field says (RFC 9112 3.2.2).
    """

    method: str
    target: bytes
    version: str  # "1.0" | "1.1"
    headers: list[tuple[bytes, bytes]]
    host: bytes
    length: int | None
    keep_alive: bool
    expects_continue: bool


class _Reading:
    """llhttp's callbacks for one head."""

    __slots__ = ("complete", "fields", "target")

    def __init__(self) -> None:
        self.fields: list[tuple[bytes, bytes]] = []
        self.target = b""
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def check_partial(buffer: bytearray, scanned: int, max_bytes: int, max_line: int) -> None:
    """Refuse an incomplete head early: bytes before `scanned` were seen before. Raises Refused.

    A client that speaks something else (TLS, bare LF) is answered at once instead of being waited for.
    """
    if not 65 <= buffer[0] <= 90:
        raise malformed("a method in upper case was expected")
    start = max(0, scanned - 1)
    if start and buffer[start] != 13:
        start += 1
    if buffer.count(b"\n", start) != buffer.count(b"\r\n", start):
        raise malformed("a line ends without CR")
    _check_line_length(buffer, max_line)
    if len(buffer) > max_bytes:
        raise Refused(HeadersTooLarge(f"the request's head is longer than {max_bytes} bytes"))


def _check_line_length(head: bytes | bytearray, most: int) -> None:
    if len(head) > most and head.find(b"\r\n", 0, most) < 0:
        raise Refused(HeadersTooLarge(f"the request line is longer than {most} bytes"))


def read_head(raw: bytes, max_headers: int, max_header_list_bytes: int, max_line: int) -> Head:
    """`raw` up to and with the empty line. Raises Refused for everything that is not exactly one valid head."""
    _check_line_length(raw, max_line)
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise malformed("the request line must be METHOD /path HTTP/1.1")
    pairs = raw.count(b"\r\n")
    if raw.count(b"\r") != pairs or raw.count(b"\n") != pairs:
        raise malformed("a bare CR or LF")
    reading = _Reading()
    parser = httptools.HttpRequestParser(reading)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # an Upgrade field, which we may ignore (RFC 9110 7.8): the request is served as it is
    except httptools.HttpParserError as error:
        raise malformed(str(error)) from None
    fields = reading.fields
    # One field per line is what the limits and the checks below count on.
    if not reading.complete or len(fields) != pairs - 2:
        raise malformed("header fields")
    if len(fields) > max_headers:
        raise Refused(HeadersTooLarge(f"more than {max_headers} header fields"))
    if sum(len(n) + len(v) + 32 for n, v in fields) > max_header_list_bytes:
        raise Refused(HeadersTooLarge(f"the header list is larger than {max_header_list_bytes} bytes"))
    version = raw[line.end() - 5 : line.end() - 2].decode()
    return _interpret(parser.get_method().decode(), reading.target, version, fields)


def _interpret(method: str, target: bytes, version: str, fields: list[tuple[bytes, bytes]]) -> Head:
    options = {t.strip().lower() for n, v in fields if n == b"connection" for t in v.split(b",")}
    length = _framing(version, fields)
    host = _host(version, fields)
    if absolute := _ABSOLUTE.fullmatch(target):
        host, target = absolute[1], _origin_form(method, absolute[2])
    return Head(
        method=method,
        target=target,
        version=version,
        headers=[f for f in fields if f[0] not in _HOP_BY_HOP],
        host=host,
        length=length,
        keep_alive=b"close" not in options and (version == "1.1" or b"keep-alive" in options),
        expects_continue=_expectation(version, fields) and length != 0,
    )


def _origin_form(method: str, rest: bytes) -> bytes:
    """What follows the authority, as if it had been sent alone (RFC 9112 3.2.1, 3.2.4)."""
    if not rest and method == "OPTIONS":
        return b"*"
    return rest if rest.startswith(b"/") else b"/" + rest


def _values(fields: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [v for n, v in fields if n == name]


def _framing(version: str, fields: list[tuple[bytes, bytes]]) -> int | None:
    """RFC 9112 6.3, without the cases in which a server may guess."""
    lengths, codings = _values(fields, b"content-length"), _values(fields, b"transfer-encoding")
    if codings:
        if lengths or version == "1.0":
            raise malformed("transfer-encoding beside content-length or in HTTP/1.0")
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise malformed("the only transfer-encoding served is chunked")
        return None
    if not lengths:
        return 0
    if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise malformed("content-length must be one decimal number")
    return int(lengths[0])


def _host(version: str, fields: list[tuple[bytes, bytes]]) -> bytes:
    hosts = _values(fields, b"host")
    if not hosts and version == "1.0":
        return b""
    if len(hosts) != 1 or _HOST.fullmatch(hosts[0]) is None:
        raise malformed("exactly one valid host field is needed")
    return hosts[0]


def _expectation(version: str, fields: list[tuple[bytes, bytes]]) -> bool:
    expected = _values(fields, b"expect")
    if not expected or version == "1.0":  # RFC 9110 10.1.1: ignored in HTTP/1.0
        return False
    if len(expected) != 1 or expected[0].lower() != b"100-continue":
        raise Refused(ExpectationFailed("the only expectation that can be met is 100-continue"))
    return True


def request_head(head: Head, *, scheme: str, peer: str) -> RequestHead:
    path, _, query = head.target.decode("ascii").partition("?")
    index: dict[bytes, bytes] = {}
    for name, value in head.headers:
        index.setdefault(name, value)
    return RequestHead(
        method=head.method, path=path, query=query, headers=head.headers, version=head.version, scheme=scheme,
        authority=head.host.decode("ascii"), peer=peer, index=index,
    )  # fmt: skip


class FixedBody:
    """A body of `length` bytes, for `feed` and `done` see ChunkedBody."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def done(self) -> bool:
        return self._left == 0

    def direct(self, size: int) -> int:
        """How many of `size` bytes that arrive now are the body's, so that they need not go through a buffer."""
        taken = min(size, self._left)
        self._left -= taken
        return taken

    def feed(self, buffer: bytearray) -> list[bytes]:
        part = bytes(memoryview(buffer)[: self._left])
        del buffer[: len(part)]
        self._left -= len(part)
        return [part]


class ChunkedBody:
    """The chunked coding (RFC 9112 7.1), strictly: CRLF only, no blanks around sizes; extensions and trailers dropped.

    `feed` takes what it can from the front of a buffer and leaves what belongs to the next request.
    """

    __slots__ = ("_crlf", "_left", "_max_bytes", "_max_small", "_small", "_trailer", "done", "size")

    def __init__(self, max_bytes: int, max_small: int) -> None:
        self.done = False
        self.size = 0  #: body bytes announced so far
        self._max_bytes, self._max_small = max_bytes, max_small
        self._left = 0  # bytes of the present chunk that are to come
        self._crlf = False  # a chunk's data is complete, its CRLF is not
        self._small = 0
        self._trailer = -1  # bytes of trailers seen; -1 before the last chunk

    def direct(self, size: int) -> int:
        """Nothing: all of it is mixed with framing."""
        return 0

    def feed(self, buffer: bytearray) -> list[bytes]:
        """Body bytes; consumes them and their framing. Raises Refused (BodyTooLarge as soon as a size says so)."""
        parts: list[bytes] = []
        while buffer and not self.done:
            if self._left:
                part = bytes(memoryview(buffer)[: self._left])
                del buffer[: len(part)]
                self._left -= len(part)
                self._crlf = not self._left
                parts.append(part)
            elif self._crlf:
                if not b"\r\n".startswith(buffer[:2]):
                    raise malformed("a chunk is longer than its size says")
                if len(buffer) == 1:
                    break
                del buffer[:2]
                self._crlf = False
            elif not self._take_line(buffer):
                break
        return parts

    def _take_line(self, buffer: bytearray) -> bool:
        """A size line or a trailer line. False when it is not complete yet."""
        limit = MAX_CHUNK_LINE_BYTES if self._trailer < 0 else MAX_TRAILER_BYTES - self._trailer
        end = buffer.find(b"\n", 0, limit)
        if end < 0:
            if len(buffer) < limit:
                return False
            raise malformed("a chunk's size line is too long") if self._trailer < 0 else _trailers_too_large()
        line = bytes(buffer[: max(0, end - 1)])
        if end == 0 or buffer[end - 1] != 13:
            raise malformed("a line ends without CR")
        del buffer[: end + 1]
        if self._trailer < 0:
            self._size_line(line)
        else:
            self._trailer_line(line)
        return True

    def _size_line(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise malformed("a chunk size must be hexadecimal digits")
        size = int(match[1], 16)
        if size == 0:
            self._trailer = 0
            return
        self.size += size
        if self.size > self._max_bytes:
            raise Refused(BodyTooLarge(f"the request body is larger than {self._max_bytes} bytes"))
        # Extensions are framing too: a long line makes its chunk count as a small one.
        self._small += size < _SMALL_CHUNK or len(line) > _SMALL_CHUNK
        if self._small > self._max_small:
            raise Refused(InvalidRequest(f"more than {self._max_small} tiny chunks", code=TOO_MANY_CHUNKS))
        self._left = size

    def _trailer_line(self, line: bytes) -> None:
        if not line:
            self.done = True
            return
        if _FIELD_LINE.fullmatch(line) is None or line.partition(b":")[0].lower() in _NO_TRAILERS:
            raise malformed("a trailer field")
        self._trailer += len(line) + 2


def _trailers_too_large() -> Refused:
    return Refused(HeadersTooLarge(f"the trailers are larger than {MAX_TRAILER_BYTES} bytes"))
