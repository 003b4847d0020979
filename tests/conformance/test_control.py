"""Cases 21-31: SETTINGS, PING, GOAWAY, WINDOW_UPDATE, priorities, extensions."""

from __future__ import annotations

import tracemalloc

import pytest

from evap.protocol import headers as code
from tests.conformance.cases import case
from tests.protocol import frames as f
from tests.protocol.joined import Raw


@case(21, "RFC 9113 6.5")
@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (f.frame(f.SETTINGS, 0, 0, bytes(5)), code.FRAME_SIZE_ERROR),
        (f.frame(f.SETTINGS, f.ACK, 0, bytes(6)), code.FRAME_SIZE_ERROR),
        (f.frame(f.SETTINGS, 0, 1, b""), code.PROTOCOL_ERROR),
    ],
)
def test_malformed_settings(frame: bytes, error: int) -> None:
    raw = Raw()
    raw.send(frame)
    assert raw.goaway == error


@case(22, "RFC 9113 6.5.2", "RFC 9218 2.1", "RFC 8441 3")
@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ((2, 2), code.PROTOCOL_ERROR),
        ((5, 100), code.PROTOCOL_ERROR),
        ((5, 1 << 24), code.PROTOCOL_ERROR),
        ((4, 1 << 31), code.FLOW_CONTROL_ERROR),
        ((8, 2), code.PROTOCOL_ERROR),
        ((9, 2), code.PROTOCOL_ERROR),
    ],
)
def test_settings_out_of_range(entry: tuple[int, int], error: int) -> None:
    raw = Raw()
    raw.send(f.settings(entry))
    assert raw.goaway == error


@case(22, "RFC 9218 2.1")
def test_no_rfc7540_priorities_must_not_change() -> None:
    raw = Raw(greet=False)
    raw.send(f.hello((9, 1)), f.settings((9, 1)))
    assert raw.healthy
    raw.send(f.settings((9, 0)))
    assert raw.goaway == code.PROTOCOL_ERROR


@case(23, "RFC 9113 6.5.2", "RFC 9113 10.5")
def test_unknown_settings_are_forgotten() -> None:
    raw = Raw(control_burst=1000)
    tracemalloc.start()
    for at in range(16, 16 + 32 * 100, 32):
        raw.send(f.settings(*[(ident, 7) for ident in range(at, at + 32)]))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert raw.healthy
    assert len(raw.core.conn.remote_settings) <= 8
    assert held < 256 << 10
    raw.send(f.settings(*[(ident, 7) for ident in range(100, 133)]))
    assert raw.goaway == code.ENHANCE_YOUR_CALM


@case(23, "CVE-2019-9515", "CVE-2019-9512", "RFC 9113 10.5")
@pytest.mark.parametrize("frame", [f.settings(), f.settings_ack(), f.ping(), f.ping(f.ACK)])
def test_settings_and_ping_floods(frame: bytes) -> None:
    raw = Raw()
    tracemalloc.start()
    sent = 0
    while not raw.core.closing and sent < 100_000:
        raw.send(frame)
        sent += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert raw.goaway == code.ENHANCE_YOUR_CALM
    assert sent <= 1001
    assert peak < 2 << 20


@case(24, "RFC 9113 6.5.3")
def test_settings_that_are_never_acknowledged() -> None:
    raw = Raw(greet=False, settings_timeout_s=10.0)
    raw.send(f.PREFACE + f.settings(), f.get(1))
    raw.wait(9.0)
    assert raw.healthy
    raw.wait(1.1)
    assert raw.goaway == code.SETTINGS_TIMEOUT
    assert raw.cancelled() == ["protocol_error"]


@case(25, "RFC 9113 6.9", "RFC 9113 6.9.1")
def test_window_overflow_of_a_stream() -> None:
    raw = Raw()
    raw.send(f.get(1), f.get(3), f.window(1, (1 << 31) - 1))
    assert raw.resets() == [code.FLOW_CONTROL_ERROR]
    assert len(raw.core.streams) == 1
    assert raw.healthy


@case(25, "RFC 9113 6.9", "RFC 9113 6.9.1")
@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (f.window(0, (1 << 31) - 1), code.FLOW_CONTROL_ERROR),
        (f.window(0, 0), code.PROTOCOL_ERROR),
        (f.window(1, 0), code.PROTOCOL_ERROR),
        (f.frame(f.WINDOW_UPDATE, 0, 0, bytes(3)), code.FRAME_SIZE_ERROR),
    ],
)
def test_malformed_window_updates(frame: bytes, error: int) -> None:
    raw = Raw()
    raw.send(f.get(1), frame)
    assert raw.goaway == error


@case(26, "RFC 9113 6.9.2")
def test_initial_window_that_overflows_an_open_stream() -> None:
    raw = Raw()
    raw.send(f.get(1), f.window(1, (1 << 31) - 1 - 65_535), f.settings((4, 65_536)))
    assert raw.goaway == code.FLOW_CONTROL_ERROR


@case(26, "RFC 9113 6.9.2")
def test_initial_window_that_would_overflow_a_closed_stream_only() -> None:
    raw = Raw()
    raw.send(f.get(1), f.window(1, (1 << 31) - 1 - 65_535), f.rst(1), f.settings((4, 65_536)))
    assert raw.healthy


@case(26, "RFC 9113 6.9.2")
def test_a_window_below_zero_waits() -> None:
    raw = Raw()
    raw.send(f.get(1))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    reply.send(bytes(60_000))
    raw.flush()
    raw.send(f.settings((4, 1000)))
    assert raw.core.stream_window(1) == 1000 - 60_000
    reply.send(b"later")
    raw.flush()
    assert len(raw.body(1)) == 60_000
    raw.send(f.window(1, 59_000 + 2))
    assert raw.body(1)[60_000:] == b"la"
    raw.send(f.settings((4, 1003)))
    assert raw.body(1)[60_000:] == b"later"
    assert raw.healthy


@case(27, "RFC 9113 6.7")
@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (f.frame(f.PING, 0, 0, bytes(7)), code.FRAME_SIZE_ERROR),
        (f.frame(f.PING, 0, 1, bytes(8)), code.PROTOCOL_ERROR),
    ],
)
def test_malformed_ping(frame: bytes, error: int) -> None:
    raw = Raw()
    raw.send(frame)
    assert raw.goaway == error


@case(28, "RFC 9113 6.8", "h2 issue 1181")
def test_goaway_from_the_client_ends_no_stream() -> None:
    raw = Raw()
    raw.send(f.get(1), f.goaway(), f.goaway())
    reply = raw.requests()[0].reply
    reply.start(200, [])
    reply.send(bytes(100_000))
    reply.end()
    raw.flush()
    raw.send(f.goaway() + f.window(1, 100_000) + f.window(0, 100_000))
    assert raw.body(1) == bytes(100_000)
    assert raw.cancelled() == []
    assert raw.goaway == code.NO_ERROR
    assert raw.core.closing


@case(28, "RFC 9113 6.8")
def test_an_idle_connection_closes_on_goaway() -> None:
    raw = Raw()
    raw.send(f.goaway())
    assert raw.goaway == code.NO_ERROR
    assert raw.core.closing


@case(29, "RFC 9113 6.3", "RFC 9113 6.4")
@pytest.mark.parametrize("frame", [f.frame(f.RST_STREAM, 0, 1, bytes(3)), f.frame(f.PRIORITY, 0, 1, bytes(4))])
def test_frames_of_the_wrong_length(frame: bytes) -> None:
    raw = Raw()
    raw.send(f.get(1), frame)
    assert raw.goaway == code.FRAME_SIZE_ERROR


@case(29, "RFC 9113 5.3.2")
def test_priorities_of_rfc_7540_are_ignored() -> None:
    raw = Raw()
    itself = (1).to_bytes(4) + b"\x0f"
    raw.send(f.frame(f.PRIORITY, 0, 3, (0).to_bytes(4) + b"\x0f"), f.frame(f.PRIORITY, 0, 1, itself))
    raw.send(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM | f.PRIO, 1, itself + f.block(f.GET)))
    assert len(raw.requests()) == 1
    assert raw.healthy


@case(30, "RFC 9218 7.1")
@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (f.priority_update(1, b"u=1", on=1), code.PROTOCOL_ERROR),
        (f.priority_update(0, b"u=1"), code.PROTOCOL_ERROR),
        (f.frame(f.PRIORITY_UPDATE, 0, 0, bytes(3)), code.FRAME_SIZE_ERROR),
    ],
)
def test_malformed_priority_update(frame: bytes, error: int) -> None:
    raw = Raw()
    raw.send(f.get(1), frame)
    assert raw.goaway == error


@case(30, "RFC 9218 7.1", "RFC 9218 8")
def test_priority_updates() -> None:
    raw = Raw(max_concurrent_streams=8)
    raw.send(f.priority_update(1, b"u=0"), f.priority_update(3, b"\xff\x00 no structured field"))
    raw.send(f.get(1, (b"priority", b"u=5")), f.get(3), f.priority_update(1, b"u=7, i"))
    first, second = raw.requests()
    assert first.head.get(b"priority") == b"u=7, i", "the last one, as nobody had the request yet"
    assert (raw.core.streams[1].urgency, raw.core.streams[3].urgency) == (7, 3)
    assert second.head.get(b"priority") == b"\xff\x00 no structured field"
    raw.send(*[f.priority_update(sid, b"u=1") for sid in range(101, 901, 2)])
    assert len(raw.core.inbound.priorities.waiting) <= 8
    assert raw.healthy


@case(31, "RFC 7838 4", "RFC 8336 2.1")
def test_altsvc_and_origin_from_a_client_change_nothing() -> None:
    raw = Raw(greet=False)
    raw.send(f.PREFACE + f.settings(), f.frame(f.ALTSVC, 0, 0, b"\x00\x01xh2"), f.frame(f.ORIGIN, 0, 0, b"\x00\x01x"))
    raw.send(f.settings_ack(), f.get(1), f.frame(f.ALTSVC, 0, 1, b"\x00\x00h2"))
    raw.requests()[0].reply.whole(200, [], b"ok")
    raw.flush()
    assert raw.body(1) == b"ok"
    assert raw.healthy
