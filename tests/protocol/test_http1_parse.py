"""Heads and chunked bodies as bytes: what is read, and everything that is refused because two servers could differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.errors import BodyTooLarge, ExpectationFailed, HeadersTooLarge, InvalidRequest
from evap.protocol.http1_parse import (
    MAX_CHUNK_LINE_BYTES,
    MAX_TRAILER_BYTES,
    ChunkedBody,
    FixedBody,
    Head,
    Refused,
    check_partial,
    read_head,
    request_head,
)

SMALL = 1 << 12  # chunks below 64 bytes
POST = b"POST /v1/completions HTTP/1.1\r\nHost: evap.test\r\n"


def head(*fields: bytes, line: bytes = b"GET / HTTP/1.1", host: bytes = b"Host: evap.test") -> Head:
    lines = [line, *([host] if host else []), *fields]
    return read_head(b"\r\n".join(lines) + b"\r\n\r\n", 100, 32 << 10, 8 << 10)


def refusal(*fields: bytes, line: bytes = b"GET / HTTP/1.1", host: bytes = b"Host: evap.test") -> type[Exception]:
    with pytest.raises(Refused) as caught:
        head(*fields, line=line, host=host)
    return type(caught.value.error)


def test_a_plain_head() -> None:
    read = head(b"X-Request-ID:  abc \t", b"Content-Length: 12", line=b"POST /v1/x?a=1&b HTTP/1.1")
    assert (read.method, read.target, read.version, read.host) == ("POST", b"/v1/x?a=1&b", "1.1", b"evap.test")
    assert read.headers == [(b"host", b"evap.test"), (b"x-request-id", b"abc"), (b"content-length", b"12")]
    assert (read.length, read.keep_alive, read.expects_continue) == (12, True, False)


def test_request_head_splits_the_query_and_indexes_the_first_value() -> None:
    made = request_head(head(b"A: 1", b"a: 2", line=b"GET /p?q=1?2 HTTP/1.1"), scheme="https", peer="::1")
    assert (made.path, made.query, made.scheme, made.peer) == ("/p", "q=1?2", "https", "::1")
    assert made.authority == "evap.test"
    assert made.get(b"a") == b"1"
    assert made.version == "1.1"


def test_hop_by_hop_fields_stay_here() -> None:
    read = head(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk", b"TE: trailers",
                b"Keep-Alive: 5", b"Transfer-Encoding: chunked")  # fmt: skip
    assert [n for n, _ in read.headers] == [b"host"]
    assert read.length is None


@pytest.mark.parametrize(
    ("line", "fields", "keeps"),
    [
        (b"GET / HTTP/1.1", (), True),
        (b"GET / HTTP/1.1", (b"Connection: close",), False),
        (b"GET / HTTP/1.1", (b"Connection: x, CLOSE ,y",), False),
        (b"GET / HTTP/1.1", (b"Connection: keep-alive", b"Connection: close"), False),
        (b"GET / HTTP/1.0", (), False),
        (b"GET / HTTP/1.0", (b"Connection: Keep-Alive",), True),
        (b"GET / HTTP/1.0", (b"Connection: keep-alive, close",), False),
    ],
)
def test_keep_alive(line: bytes, fields: tuple[bytes, ...], keeps: bool) -> None:
    assert head(*fields, line=line).keep_alive is keeps


@pytest.mark.parametrize(
    "line",
    [
        b"GET  / HTTP/1.1", b"GET /  HTTP/1.1", b" GET / HTTP/1.1", b"GET / HTTP/1.1 ", b"GET\t/ HTTP/1.1",
        b"get / HTTP/1.1", b"GET / HTTP/1.2", b"GET / HTTP/2.0", b"GET / HTTP/0.9", b"GET / http/1.1", b"GET /",
        b"GET / HTTP/1.10", b"GET / HTTP/11", b"GET / RTSP/1.0", b"GET / ICE/1.0", b"PRI * HTTP/2.0",
        b"GET * HTTP/1.1", b"OPTIONS ** HTTP/1.1", b"OPTIONS *?a HTTP/1.1", b"CONNECT evap.test:443 HTTP/1.1",
        b"GET http:///a HTTP/1.1", b"GET http://u@evap.test/ HTTP/1.1", b"GET http://u:p@evap.test/ HTTP/1.1",
        b"GET ftp://evap.test/ HTTP/1.1", b"GET http:/evap.test HTTP/1.1", b"GET //http://x HTTP/1.2",
        b"GET http://[::1/ HTTP/1.1", b"GET http://a:99999999/ HTTP/1.1", b"GET http://a/#b HTTP/1.1",
        b"GET http://a\\b/ HTTP/1.1", b"CONNECT http://a/ HTTP/1.1", b"OPTIONS http://a* HTTP/1.1x",
        b"CONNECT / HTTP/1.1", b"GET evap.test HTTP/1.1", b"GET /a b HTTP/1.1", b"GET /a#b HTTP/1.1",
        b"GET /\xc3\xa9 HTTP/1.1", b"GET /\x00 HTTP/1.1", b"GET /\x7f HTTP/1.1", b"GET /\t HTTP/1.1", b"",
        b"FROB / HTTP/1.1", b"GE(T / HTTP/1.1", b"GET /a\rb HTTP/1.1", b"GET /a\nb HTTP/1.1",
    ],
)  # fmt: skip
def test_request_lines_that_are_refused(line: bytes) -> None:
    assert refusal(line=line) is InvalidRequest


@pytest.mark.parametrize(
    ("line", "target", "host"),
    [
        (b"OPTIONS *", b"*", b"evap.test"),
        (b"OPTIONS http://a.test:80", b"*", b"a.test:80"),
        (b"OPTIONS http://a.test/", b"/", b"a.test"),
        (b"OPTIONS http://a.test?x", b"/?x", b"a.test"),
        (b"GET http://a.test", b"/", b"a.test"),
        (b"GET http://a.test?q=/", b"/?q=/", b"a.test"),
        (b"GET HTTPS://A.test:8443/v1/x?q=http://b", b"/v1/x?q=http://b", b"A.test:8443"),
        (b"POST http://[::1]:8000/v1/chat/completions", b"/v1/chat/completions", b"[::1]:8000"),
        (b"GET //a.test/b", b"//a.test/b", b"evap.test"),
    ],
)
def test_absolute_and_asterisk_form(line: bytes, target: bytes, host: bytes) -> None:
    """RFC 9112 3.2.2: servers take the absolute form too, and then ignore Host; they need it all the same (3.2)."""
    read = head(line=line + b" HTTP/1.1")
    assert (read.target, read.host) == (target, host)
    assert refusal(line=line + b" HTTP/1.1", host=b"") is InvalidRequest
    assert refusal(line=line + b" HTTP/1.1", host=b"Host: a b") is InvalidRequest


@pytest.mark.parametrize(
    "field",
    [
        b"A : b", b" A: b", b"\tA: b", b"A", b": b", b"A b: c", b"A\x00: b", b"A: b\x00c", b"A: b\x01", b"A: b\x7f",
        b"A: b\rc", b"A: b\nc: d", b"A: b\r\n fold", b"A: b\r\n\tfold", b"A\xff: b", b"A: \x1b[31m",
    ],
)  # fmt: skip
def test_fields_that_are_refused(field: bytes) -> None:
    assert refusal(field) is InvalidRequest
    assert refusal(field, line=b"GET / HTTP/1.0") is InvalidRequest


@pytest.mark.parametrize(
    "fields",
    [
        (b"Content-Length: 3", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked", b"Content-Length: 3"),
        (b"Content-Length: 3", b"Content-Length: 4"),
        (b"Content-Length: 3", b"Content-Length: 3"),
        (b"Content-Length: 3, 3",), (b"Content-Length: +3",), (b"Content-Length: -3",), (b"Content-Length: 3 3",),
        (b"Content-Length:",), (b"Content-Length: 0x3",), (b"Content-Length: 3;",), (b"Content-Length: 3_0",),
        (b"Content-Length: " + b"9" * 19,), (b"Content-Length: " + b"1" * 5000,),
        (b"Transfer-Encoding: gzip, chunked",), (b"Transfer-Encoding: chunked, gzip",),
        (b"Transfer-Encoding: xchunked",), (b"Transfer-Encoding: identity",),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked, chunked",), (b"Transfer-Encoding: \x0bchunked",), (b"Transfer-Encoding:",),
        (b"Transfer-Encoding: chunked, ",), (b"Transfer-Encoding: \"chunked\"",),
    ],
)  # fmt: skip
def test_framings_that_are_refused(fields: tuple[bytes, ...]) -> None:
    assert refusal(*fields, line=b"POST / HTTP/1.1") is InvalidRequest


def test_chunked_is_refused_in_http_1_0() -> None:
    assert refusal(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0") is InvalidRequest


@pytest.mark.parametrize(
    "host",
    [
        b"", b"Host:", b"Host: a\r\nHost: a", b"Host: a b", b"Host: user@evap.test", b"Host: a/x", b"Host: a,b@c",
        b"Host: http://evap.test", b"Host: evap.test:80x", b"Host: [::1", b"Host: \xc3\xa9", b"Host: a?b", b"Host: [x]",
    ],
)  # fmt: skip
def test_hosts_that_are_refused(host: bytes) -> None:
    assert refusal(host=host) is InvalidRequest


@pytest.mark.parametrize("host", [b"evap.test", b"evap.test:8000", b"127.0.0.1:1", b"[::1]:8000", b"a_b.c:"])
def test_hosts_that_are_read(host: bytes) -> None:
    assert head(host=b"Host: " + host).host == host


def test_http_1_0_needs_no_host() -> None:
    assert head(host=b"", line=b"GET / HTTP/1.0").host == b""
    assert refusal(host=b"Host: a\r\nHost: b", line=b"GET / HTTP/1.0") is InvalidRequest


def test_expectations() -> None:
    assert head(b"Expect: 100-Continue", b"Content-Length: 1").expects_continue
    assert not head(b"Expect: 100-continue").expects_continue  # no body to continue with
    assert not head(b"Expect: anything", b"Content-Length: 1", line=b"POST / HTTP/1.0").expects_continue
    assert refusal(b"Expect: 200-ok") is ExpectationFailed
    assert refusal(b"Expect: 100-continue", b"Expect: 100-continue") is ExpectationFailed


def test_limits_of_a_head() -> None:
    assert len(head(*[b"A%d: b" % i for i in range(99)]).headers) == 100
    assert refusal(*[b"A%d: b" % i for i in range(100)]) is HeadersTooLarge
    assert refusal(b"A: " + b"x" * (32 << 10)) is HeadersTooLarge


def partial(data: bytes, scanned: int = 0) -> None:
    check_partial(bytearray(data), scanned, 32 << 10, 8 << 10)


def test_what_is_no_http_is_refused_before_a_head_is_complete() -> None:
    for data in (b"\x16\x03\x01", b"get /", b"GET / HTTP/1.1\n", b"\n", b"GET / HTTP/1.1\r\nA: b\n"):
        with pytest.raises(Refused):
            partial(data)
    partial(b"GET / HTTP/1.1\r")
    partial(b"GET / HTTP/1.1\r\nA", 15)  # the CR was seen before
    partial(b"GET / HTTP/1.1\r\nA", 16)
    with pytest.raises(Refused):
        partial(b"GET / HTTP/1.1\r\n\n", 16)


def test_a_head_that_does_not_end_is_refused_at_its_limit() -> None:
    for data in (b"GET /" + b"x" * 8192, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 6000):
        with pytest.raises(Refused) as caught:
            partial(data)
        assert isinstance(caught.value.error, HeadersTooLarge)


# Bodies


def chunks(data: bytes, limit: int = 1 << 20) -> tuple[bytes, bytes, bool]:
    body, buffer = ChunkedBody(limit, SMALL), bytearray(data)
    return b"".join(body.feed(buffer)), bytes(buffer), body.done


def test_chunks_are_joined_and_the_next_request_is_left_alone() -> None:
    assert chunks(b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\nGET") == (b"abc0123456789", b"GET", True)
    assert chunks(b"000\r\nTrailer: x\r\nB:\r\n\r\nrest") == (b"", b"rest", True)
    assert chunks(b"3\r\nab") == (b"ab", b"", False)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 30), max_size=30), st.data())
def test_chunked_in_any_portions(parts: list[bytes], cuts: list[int], data: st.DataObject) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\nNEXT"
    body, buffer, read, at = ChunkedBody(1 << 20, SMALL), bytearray(), b"", 0
    for cut in [*cuts, len(wire)]:
        buffer += wire[at : at + cut]
        at += cut
        read += b"".join(body.feed(buffer))
        if body.done:
            break
    assert body.done
    assert read == b"".join(parts)
    assert bytes(buffer) + wire[at:] == b"NEXT"


@pytest.mark.parametrize(
    "wire",
    [
        b"\r\n", b"x\r\n", b"0x3\r\nabc\r\n", b"+3\r\nabc\r\n", b"-1\r\n", b" 3\r\nabc\r\n", b"3 \r\nabc\r\n",
        b"3\nabc\r\n",
        b"3\t;a\r\nabc\r\n", b"3;\x00\r\n", b"3;a\rb\r\n", b"3\r\nabcd\r\n", b"3\r\nabc\n", b"3\r\nabc\rX",
        b"3\r\nabcX",
        b"f" * 17 + b"\r\n", b"3_0\r\n", b"\n", b"3;" + b"x" * MAX_CHUNK_LINE_BYTES, b"0\r\n\n", b"0\r\nbad\r\n",
        b"0\r\n A: b\r\n", b"0\r\nA : b\r\n", b"0\r\nA: \x00\r\n", b"0\r\nA: b\rc\r\n",
        b"0\r\nContent-Length: 3\r\n", b"0\r\nTRANSFER-ENCODING: chunked\r\n", b"0\r\nhost: x\r\n",
    ],
)  # fmt: skip
def test_chunked_bodies_that_are_refused(wire: bytes) -> None:
    def feed(step: int) -> None:
        body, buffer = ChunkedBody(1 << 62, SMALL), bytearray()
        for at in range(0, len(wire), step):
            buffer += wire[at : at + step]
            body.feed(buffer)

    for step in (len(wire), 1):
        with pytest.raises(Refused) as caught:
            feed(step)
        assert isinstance(caught.value.error, InvalidRequest)


def test_limits_of_a_chunked_body() -> None:
    with pytest.raises(Refused) as caught:
        chunks(b"5\r\n01234\r\n6\r\n", 10)  # refused by the size line, before the data
    assert isinstance(caught.value.error, BodyTooLarge)
    trailers = b"0\r\n" + b"A: b\r\n" * (MAX_TRAILER_BYTES // 6 + 1)
    for data in (trailers, b"0\r\nA: " + b"x" * MAX_TRAILER_BYTES):
        with pytest.raises(Refused) as caught:
            chunks(data)
        assert isinstance(caught.value.error, HeadersTooLarge)
    with pytest.raises(Refused):
        chunks(b"1\r\nx\r\n" * (SMALL + 1))
    assert len(chunks(b"1\r\nx\r\n" * SMALL)[0]) == SMALL


def test_a_fixed_body_takes_its_length_and_no_more() -> None:
    body, buffer = FixedBody(5), bytearray(b"abc")
    assert (body.feed(buffer), body.done) == ([b"abc"], False)
    buffer += b"deGET"
    assert (body.feed(buffer), body.done, bytes(buffer)) == ([b"de"], True, b"GET")
