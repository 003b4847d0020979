"""Responses as they leave: whole, streamed, without a body, for HTTP/1.0, broken off, and never with a bad field."""

from __future__ import annotations

import h11
import pytest

from evap.protocol.events import PeerGone
from tests.protocol.http1_wire import GET, JSON, SSE, Wire, read


def test_a_whole_answer_and_the_next_request() -> None:
    wire = Wire()
    for body in (b"{}", b"", b"x" * 100_000):
        reply = wire.request()
        reply.whole(200, JSON, body)
        status, headers, got = read(wire.flush())
        assert (status, got, headers["content-length"], headers["server"]) == (200, body, str(len(body)), "evap")
        assert headers["date"].endswith("GMT")
        assert "connection" not in headers
        assert not reply.alive
        assert wire.core.open_replies == 0
        assert not wire.core.closing
    assert wire.shared.requests == 3


def test_a_streamed_answer_is_chunked() -> None:
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    reply.send(b"data: 1\n\n")
    reply.send(b"")  # an empty chunk would end the body
    reply.send(b"data: 2\n\n")
    reply.end([(b"x-end", b"yes")])
    data = wire.flush()
    assert data.endswith(b"0\r\nx-end: yes\r\n\r\n")
    status, headers, body = read(data)
    assert (status, body) == (200, b"data: 1\n\ndata: 2\n\n")
    assert headers["transfer-encoding"] == "chunked"
    assert "content-length" not in headers


def test_head_gets_the_head_of_either_form() -> None:
    wire = Wire()
    request = GET.replace(b"GET", b"HEAD")
    wire.request(request).whole(200, JSON, b"12345")
    status, headers, body = read(wire.flush(), "HEAD")
    assert (status, headers["content-length"], body) == (200, "5", b"")
    reply = wire.request(request)
    assert wire.core.stream_window(0) == 0
    reply.start(200, SSE)
    reply.send(b"never")
    assert wire.core.stream_window(0) == 0
    reply.end()
    assert read(wire.flush(), "HEAD")[2] == b""


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body(status: int) -> None:
    wire = Wire()
    wire.request().whole(status, (), b"")
    assert b"content-length" not in wire.flush()
    reply = wire.request()
    reply.start(status, ())
    reply.end()
    data = wire.flush()
    assert b"transfer-encoding" not in data
    assert data.endswith(b"\r\n\r\n")
    assert data.count(b"\r\n\r\n") == 1


def test_connection_close_and_http_1_0() -> None:
    for request in (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"GET / HTTP/1.0\r\n\r\n"):
        wire = Wire()
        wire.request(request + GET).whole(200, JSON, b"{}")
        assert read(wire.flush())[1]["connection"] == "close"
        assert wire.core.closing
        assert len(wire.requests) == 1
    wire = Wire()
    wire.request(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").whole(200, JSON, b"{}")
    assert read(wire.flush())[1]["connection"] == "keep-alive"
    assert not wire.core.closing


def test_http_1_0_streams_until_the_connection_closes() -> None:
    wire = Wire()
    reply = wire.request(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    reply.start(200, SSE)
    reply.send(b"data: 1\n\n")
    assert wire.core.acquire(reply) is None or wire.core.stream_window(0) == 0  # rows are chunks
    reply.end()
    data = wire.flush()
    head, _, body = data.partition(b"\r\n\r\n")
    assert body == b"data: 1\n\n"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert wire.core.closing


def test_abort_breaks_off_so_that_it_shows() -> None:
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    reply.send(b"data: 1\n\n")
    reply.abort()
    data = wire.flush()
    with pytest.raises(h11.RemoteProtocolError):
        read(data)
    assert wire.core.closing
    assert not wire.core.aborting
    assert wire.eof() == [PeerGone()]  # its owner ended it: no cancel
    wire = Wire()
    reply = wire.request(b"GET / HTTP/1.0\r\n\r\n")
    reply.start(200, SSE)
    reply.send(b"data: 1\n\n")
    reply.abort()
    assert wire.core.aborting  # a plain close would look like the end of the body


def test_refuse() -> None:
    wire = Wire()
    wire.request().refuse()
    data = wire.flush()
    status, headers, _ = read(data)
    assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
    assert wire.core.closing
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    reply.refuse()
    wire.flush()
    assert wire.core.closing


def test_our_own_bad_header_is_never_sent() -> None:
    wire = Wire()
    reply = wire.request()
    for name, value in ((b"a", b"b\r\nc: d"), (b"A", b"b"), (b"a b", b"c"), (b"transfer-encoding", b"chunked")):
        with pytest.raises(ValueError, match="header"):
            reply.whole(200, [(name, value)], b"{}")
    reply.whole(200, JSON, b"{}")
    assert read(wire.flush())[0] == 200
