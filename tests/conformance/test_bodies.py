"""Cases 32-39: flow control and request bodies."""

from __future__ import annotations

import pytest

from evap.errors import BodyTooLarge
from evap.protocol import headers as code
from evap.protocol.limits import Shared
from tests.conformance.cases import case
from tests.protocol import frames as f
from tests.protocol.joined import Raw


def length(n: int) -> tuple[bytes, bytes]:
    return (b"content-length", b"%d" % n)


@case(32, "RFC 9113 6.9.1")
def test_more_data_than_the_stream_window() -> None:
    raw = Raw(stream_window_bytes=65_535)
    raw.core.conn.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]  # credit nothing
    raw.send(f.headers(1), *[f.data(1, bytes(16_384)) for _ in range(4)])
    assert raw.goaway == code.FLOW_CONTROL_ERROR


@case(32, "RFC 9113 6.9.1")
def test_more_data_than_the_connection_window() -> None:
    raw = Raw(connection_window_bytes=65_535, stream_window_bytes=1 << 20)
    raw.core.conn.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]
    raw.send(f.headers(1), *[f.data(1, bytes(16_384)) for _ in range(4)])
    assert raw.goaway == code.FLOW_CONTROL_ERROR


@case(33, "RFC 9113 6.9", "CVE-2019-9517")
def test_a_window_that_stays_zero_cancels_the_stream() -> None:
    raw = Raw(greet=False, stall_timeout_s=30.0)
    raw.send(f.hello((4, 0)), f.get(1))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    raw.wait(40)
    assert raw.cancelled() == []
    reply.send(b"token")
    raw.flush()
    raw.wait(29)
    assert raw.cancelled() == []
    raw.wait(1.1)
    assert raw.cancelled() == ["stalled"]
    assert raw.resets(1) == [code.CANCEL]
    assert not reply.alive
    assert raw.healthy


@case(34, "RFC 9113 6.9", "CVE-2019-9511")
def test_a_window_opened_octet_by_octet_is_bounded_work() -> None:
    raw = Raw(greet=False, stall_timeout_s=30.0, control_burst=1000, control_per_s=200.0)
    raw.send(f.hello((4, 0)), f.get(1))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    reply.send(bytes(1 << 20))
    raw.flush()
    for _ in range(2000):
        raw.send(f.window(1, 1))
        if raw.core.closing:
            break
    assert raw.goaway == code.ENHANCE_YOUR_CALM
    assert len(raw.body(1)) <= 1000


@case(34, "RFC 9113 6.9")
def test_an_octet_a_second_is_stalling() -> None:
    raw = Raw(greet=False, stall_timeout_s=30.0)
    raw.send(f.hello((4, 0)), f.get(1))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    reply.send(bytes(1 << 20))
    raw.flush()
    for _ in range(32):
        raw.wait(1.0)
        raw.send(f.window(1, 1))
    assert raw.cancelled() == ["stalled"]


@case(35, "RFC 9113 10.5")
def test_a_client_that_does_not_read() -> None:
    raw = Raw(stall_timeout_s=30.0)
    raw.send(f.settings((4, 1 << 30)), f.window(0, 1 << 30), f.get(1))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    reply.send(bytes(4 << 20))
    out = sum(len(part) for part in raw.core.take_output())
    assert 256 << 10 <= out < (256 << 10) + 32_768
    raw.core.written(out, raw.now_ns)
    assert raw.core.take_output() == []
    assert reply.buffered > 3 << 20
    raw.wait(31)
    assert raw.cancelled() == ["stalled"]
    assert raw.core.closing
    assert raw.core.aborting


@case(36, "CVE-2019-9518", "RFC 9113 10.5")
@pytest.mark.parametrize(
    "piece", [f.data(1), f.data(1, b"x"), f.frame(f.DATA, f.PADDED, 1, b"\xff" + bytes(255))],
    ids=["empty", "one octet", "padding only"],
)  # fmt: skip
def test_tiny_data_flood(piece: bytes) -> None:
    raw = Raw()
    raw.send(f.headers(1))
    sent = 0
    while not raw.core.closing and sent < 10_000:
        raw.send(piece)
        sent += 1
    assert raw.goaway == code.ENHANCE_YOUR_CALM
    assert sent <= 1001


@case(37, "RFC 9110 15.5.14", "RFC 9113 8.1")
def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes() -> None:
    raw = Raw(max_body_bytes=1000)
    raw.send(f.headers(1, (*f.POST, length(1001))))
    assert raw.status(1) == 413
    raw.wait(1)
    assert raw.resets(1) == [code.NO_ERROR]
    assert raw.healthy


@case(37, "RFC 9110 15.5.14", "RFC 9113 8.1")
def test_a_body_that_grows_too_large() -> None:
    raw = Raw(max_body_bytes=1000)
    raw.send(f.headers(1), f.data(1, bytes(1000)))
    assert raw.status(1) is None
    raw.send(f.data(1, b"x"))
    assert raw.status(1) == 413
    raw.wait(1)
    assert raw.resets(1) == [code.NO_ERROR]
    raw.send(f.post(3, bytes(1000)))
    assert raw.requests()[0].body == bytes(1000)


@case(37, "RFC 9110 15.5.9")
def test_a_body_that_stops_coming() -> None:
    raw = Raw(body_timeout_s=60.0)
    raw.send(f.headers(1))
    raw.wait(59)
    raw.send(f.data(1, bytes(100)))
    raw.wait(59)
    assert raw.status(1) is None
    raw.wait(2)
    assert raw.status(1) == 408
    raw.wait(1)
    assert raw.resets(1) == [code.NO_ERROR]
    assert raw.shared.body_bytes == 0


@case(37, "RFC 9110 15.6.4")
def test_all_bodies_together_are_bounded() -> None:
    shared = Shared()
    raw, other = Raw(shared=shared, max_buffered_body_bytes=30_000), Raw(shared=shared, max_buffered_body_bytes=30_000)
    raw.send(f.headers(1), f.data(1, bytes(16_000)))
    other.send(f.headers(1), f.data(1, bytes(16_000)))
    assert other.status(1) == 503
    assert shared.body_bytes == 16_000
    raw.send(f.data(1, b"", end=True))
    assert len(raw.requests()) == 1
    assert shared.body_bytes == 0


@case(38, "RFC 9113 6.9", "RFC 9113 5.1")
def test_unread_bodies_of_reset_streams_do_not_leak_window() -> None:
    raw = Raw(connection_window_bytes=65_535)
    for sid in range(1, 101, 2):
        raw.send(f.headers(sid), f.data(sid, bytes(16_000)), f.rst(sid))
        raw.wait(0.1)
    assert raw.healthy
    assert raw.core.conn.inbound_flow_control_window > 65_535 // 2
    assert raw.shared.body_bytes == 0


@case(39, "RFC 9113 8.1.1")
@pytest.mark.parametrize(
    "bad",
    [
        f.headers(1, (*f.POST, length(3))) + f.data(1, b"12", end=True),
        f.headers(1, (*f.POST, length(1))) + f.data(1, b"12"),
        f.headers(1, (*f.POST, length(3))) + f.data(1, b"12") + f.headers(1, ((b"x-t", b"1"),), end=True),
        f.headers(1, (*f.POST, length(3)), end=True),
        f.headers(1, (*f.POST, length(0))) + f.data(1, b"1", end=True),
    ],
    ids=["short", "long", "short, trailers", "END_STREAM on HEADERS", "zero"],
)
def test_content_length_that_is_not_true(bad: bytes) -> None:
    raw = Raw()
    raw.send(bad)
    assert raw.resets(1) == [code.PROTOCOL_ERROR]
    assert raw.requests() == []
    raw.send(f.post(3, b"12", length(2)))
    assert raw.requests()[0].body == b"12"
    assert raw.healthy


@case(39, "RFC 9110 8.6")
def test_trailers_after_the_right_length() -> None:
    raw = Raw()
    raw.send(f.headers(1, (*f.POST, length(2))), f.data(1, b"12"), f.headers(1, ((b"x-t", b"1"),), end=True))
    assert raw.requests()[0].body == b"12"


def test_the_error_is_in_the_table() -> None:
    assert code.wire_code(BodyTooLarge(""))[0] == 413
