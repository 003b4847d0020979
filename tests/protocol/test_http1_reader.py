"""From bytes to requests: portions, framing, Expect, limits and deadlines."""

from __future__ import annotations

import pytest

from evap.protocol.events import PeerGone
from evap.protocol.limits import NS
from tests.protocol.http1_wire import CONFIG, GET, JSON, Wire, post, read, status_of


def test_a_request_in_single_bytes() -> None:
    wire = Wire()
    for i, byte in enumerate(post(b"hello")):
        assert not wire.requests, i
        wire.receive(bytes([byte]))
    (ready,) = wire.requests
    assert (ready.head.method, ready.head.path, ready.head.version, ready.body) == (
        "POST", "/v1/completions", "1.1", b"hello",
    )  # fmt: skip
    assert (ready.head.scheme, ready.head.authority, ready.head.peer) == ("http", "evap.test", "127.0.0.1:1")


def test_upgrade_h2c_is_ignored_and_keeps_its_body() -> None:
    wire = Wire()
    fields = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA")
    reply = wire.request(post(b'{"a":1}', *fields))
    assert wire.requests[0].body == b'{"a":1}'
    reply.whole(200, JSON, b"{}")
    assert read(wire.flush())[0] == 200
    assert not wire.core.closing


def test_a_chunked_request_body() -> None:
    wire = Wire()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire.receive(head)
    wire.receive(b"5\r\nhello\r\n1")
    assert wire.shared.body_bytes == 5
    wire.receive(b"\r\n!\r\n0\r\nT: x\r\n\r\n" + GET)
    assert wire.requests[0].body == b"hello!"
    assert wire.shared.body_bytes == 0


def test_a_stray_crlf_between_requests_is_skipped() -> None:
    wire = Wire()
    wire.receive(b"\r")
    wire.receive(b"\n" + GET)
    assert len(wire.requests) == 1


def test_a_body_may_hold_what_a_head_may_not() -> None:
    body = b'{\n  "a": 1,\n\r\0}\n' + b"x" * 50_000
    wire = Wire()
    wire.receive(post(body))
    assert wire.requests[0].body == body
    wire = Wire()
    wire.receive(GET + post(body))
    wire.reply().whole(200, JSON, b"{}")
    wire.flush()
    assert wire.requests[1].body == body


def test_100_comes_when_the_body_is_wanted_and_has_not_begun() -> None:
    wire = Wire()
    request = post(b"abc", b"Expect: 100-continue")
    wire.receive(request[:-3])
    assert wire.flush() == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert wire.flush() == b""
    wire.receive(request[-3:])
    assert wire.flush() == b""
    assert wire.requests[0].body == b"abc"
    wire = Wire()
    wire.receive(request)
    assert wire.flush() == b""
    assert wire.requests


def test_no_100_for_what_is_refused() -> None:
    wire = Wire(max_body_bytes=2)
    wire.receive(post(b"abc", b"Expect: 100-continue")[:-3])
    assert status_of(wire) == (413, "body_too_large")
    wire = Wire()
    wire.receive(post(b"abc", b"Expect: the-moon"))
    assert status_of(wire) == (417, "expectation_failed")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\n\n", b"\x16\x03\x01\x02", b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
def test_malformed_requests_get_400_and_the_end(data: bytes) -> None:
    wire = Wire()
    assert wire.receive(data + GET) == []
    assert status_of(wire) == (400, "bad_request")
    assert wire.receive(GET) == []
    assert wire.shared.counts["violations"] == 1
    assert wire.core.closing
    assert not wire.core.aborting


def test_header_limits_answer_431() -> None:
    for data in (GET[:-2] + b"A: b\r\n" * 101 + b"\r\n", b"GET /" + b"x" * 9000, GET[:-2] + b"A: " + b"x" * 40_000):
        wire = Wire()
        wire.receive(data)
        assert status_of(wire) == (431, "headers_too_large")


def test_body_limits_answer_413_early_and_when_counting() -> None:
    wire = Wire(max_body_bytes=10)
    wire.receive(post(b"x" * 11)[:-11])
    assert status_of(wire) == (413, "body_too_large")
    assert wire.core.closing
    wire.receive(b"x" * 11)  # the body that was on its way
    assert wire.shared.body_bytes == 0
    assert wire.eof() == [PeerGone()]
    assert wire.core.closing
    wire = Wire(max_body_bytes=10)
    wire.receive(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n12345678\r\n3\r\n")
    assert status_of(wire) == (413, "body_too_large")
    assert wire.shared.body_bytes == 0


def test_all_bodies_together_are_bounded() -> None:
    wire = Wire(max_buffered_body_bytes=1 << 20)
    wire.shared.body_bytes = (1 << 20) - 4
    wire.receive(post(b"12345678")[:-3])
    assert status_of(wire) == (503, "too_many_body_bytes")
    assert wire.shared.limits["body_bytes"] == 1
    assert wire.shared.body_bytes == (1 << 20) - 4


def test_an_error_answer_is_never_longer_than_its_peer_deserves() -> None:
    wire = Wire()
    wire.receive(b"GET / HTTP/1.1\r\nHost: " + b"@" * 8000 + b"\r\n\r\n")
    assert len(wire.flush()) < 1024


def test_deadlines() -> None:
    wire = Wire()
    assert wire.core.deadline_ns == wire.now + CONFIG.preface_timeout_s * NS
    wire.pass_s(CONFIG.preface_timeout_s - 0.1)
    assert not wire.core.closing
    wire.pass_s(0.1)
    assert wire.core.closing  # no first request: closed without a word
    assert wire.flush() == b""

    wire = Wire()
    wire.receive(GET[:10])
    wire.pass_s(CONFIG.header_timeout_s - 1)
    wire.receive(GET[10:20])  # more of the head does not move its deadline
    wire.pass_s(1)
    assert status_of(wire) == (408, "request_timeout")

    wire = Wire()
    wire.receive(post(b"abc")[:-3])
    for _ in range(2):  # each byte of the body moves its deadline
        wire.pass_s(CONFIG.body_timeout_s - 1)
        wire.receive(b"a")
    wire.pass_s(CONFIG.body_timeout_s - 1)
    assert wire.flush() == b""
    wire.pass_s(1)
    assert status_of(wire) == (408, "request_timeout")


def test_idle_connections_close_and_running_ones_do_not() -> None:
    wire = Wire()
    reply = wire.request()
    wire.pass_s(CONFIG.idle_timeout_s * 10)
    assert reply.alive
    reply.whole(200, JSON, b"{}")
    wire.flush()
    wire.pass_s(CONFIG.idle_timeout_s - 1)
    assert not wire.core.closing
    wire.pass_s(1)
    assert wire.core.closing
    assert wire.flush() == b""


def test_eof_inside_a_request_gives_its_bytes_back() -> None:
    wire = Wire()
    wire.receive(post(b"abc")[:-1])
    assert wire.shared.body_bytes == 2
    assert wire.eof() == [PeerGone()]
    assert wire.shared.body_bytes == 0
