"""Every limit of the wire is counted by name when it refuses or closes, and the octets that are held are given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from evap.config import ProtocolConfig
from evap.protocol import headers as code
from evap.protocol.limits import LIMITS, Shared
from evap.protocol.spending import BUCKETS
from tests.protocol import frames as f
from tests.protocol.http1_wire import GET, Wire, post
from tests.protocol.joined import HIGH_WATER, Raw

SMALL: dict[str, Any] = {"reset_burst": 5, "control_burst": 50}


def floods(frame: bytes, *, first: bytes = b"", times: int = 5000) -> Callable[[Raw], object]:
    return lambda raw: raw.send(first, frame * times)


def resets(raw: Raw) -> None:
    for sid in range(1, 101, 2):
        raw.send(f.get(sid), f.rst(sid))


def waits(seconds: float, first: bytes = b"") -> Callable[[Raw], object]:
    def run(raw: Raw) -> None:
        raw.send(first)
        raw.wait(seconds)
        raw.wait(seconds)

    return run


def stalls(raw: Raw) -> None:
    raw.send(f.get(1))
    raw.requests()[0].reply.whole(200, [], bytes(100_000))
    raw.flush()
    raw.wait(31)
    raw.wait(31)


#: limit -> what overruns it
CASES: dict[str, Callable[[Raw], object]] = {
    "resets": resets,
    "control_frames": floods(f.ping()),
    "window_updates": floods(f.window(0, 1)),
    "late_frames": floods(f.data(1), first=f.get(1) + f.rst(1)),
    "streams": lambda raw: raw.send(*[f.get(sid) for sid in range(1, 21, 2)]),
    "header_block": lambda raw: raw.send(
        f.headers(1, flags=0), *[f.frame(f.CONTINUATION, 0, 1, b"") for _ in range(20)]
    ),
    "header_list": lambda raw: raw.send(f.headers(1, [*f.GET, (b"x", b"y" * 5000)], end=True)),
    "settings": lambda raw: raw.send(f.settings(*[(4, 5)] * 50)),
    "body_size": lambda raw: raw.send(f.headers(1), f.data(1, bytes(2000))),
    "body_timeout": waits(61, f.headers(1)),
    "header_timeout": waits(11, f.get(1)[:20]),
    "idle_timeout": waits(301),
    "stall_timeout": stalls,
}  # fmt: skip


@pytest.mark.parametrize("limit", CASES)
def test_what_overruns_a_limit_is_counted_as_that(limit: str) -> None:
    raw = Raw(**SMALL, max_concurrent_streams=8, max_header_list_bytes=4096, max_body_bytes=1000)
    CASES[limit](raw)
    assert raw.shared.limits[limit] >= 1
    others = {name for name, count in raw.shared.limits.items() if count} - {limit}
    assert not others - {"frames_at_once"}, "a flood waits its turn, too"
    if limit in BUCKETS:
        assert (raw.goaway, raw.shared.limits[limit]) == (code.ENHANCE_YOUR_CALM, 1)


@pytest.mark.parametrize(("limit", "greeting"), [("preface_timeout", b""), ("settings_timeout", f.settings())])
def test_a_client_that_does_not_greet(limit: str, greeting: bytes) -> None:
    raw = Raw(greet=False)
    raw.send(f.PREFACE + greeting)
    raw.wait(11)
    assert {name for name, count in raw.shared.limits.items() if count} == {limit}


def test_a_first_burst_without_end() -> None:
    raw = Raw(greet=False, **SMALL, max_concurrent_streams=8)
    raw.send(f.PREFACE + f.settings(), *[f.get(sid) for sid in range(1, 8001, 2)])
    raw.send(*[f.get(sid) for sid in range(8001, 9001, 2)])
    assert (raw.goaway, raw.shared.limits["refused_streams"]) == (code.ENHANCE_YOUR_CALM, 1)
    assert raw.shared.limits["streams"] > 2000


def test_a_transport_that_takes_nothing() -> None:
    raw = Raw()
    raw.core.written(HIGH_WATER, raw.now_ns)
    raw.holds = HIGH_WATER
    raw.wait(31)
    assert raw.shared.limits["stall_timeout"] == 1


def test_streams_of_all_connections_together() -> None:
    shared = Shared()
    one, other = (Raw(shared=shared, max_open_streams=3) for _ in range(2))
    one.send(f.get(1), f.get(3))
    other.send(f.get(1), f.get(3), f.get(5))
    assert (other.resets(3), other.resets(5)) == ([code.REFUSED_STREAM], [code.REFUSED_STREAM])
    assert (shared.streams, shared.limits["open_streams"]) == (3, 2)
    one.requests()[0].reply.whole(200, [], b"")
    one.flush()
    other.send(f.get(7))
    assert len(other.requests()) == 2
    one.core.eof(one.now_ns)
    other.core.eof(other.now_ns)
    assert (shared.streams, shared.header_bytes) == (0, 0)


def test_heads_of_all_connections_together() -> None:
    shared = Shared()
    large = (b"x-large", b"y" * 15_000)
    one, other = (Raw(shared=shared, max_buffered_header_bytes=65_536) for _ in range(2))
    for sid in (1, 3, 5):
        one.send(f.get(sid, large))
    other.send(f.get(1, large), f.get(3, large))
    assert other.status(1) is None
    assert (other.status(3), shared.limits["header_bytes"]) == (503, 1)
    assert b"too_many_header_bytes" in other.body(3)
    for request in one.requests():
        request.reply.whole(200, [], b"")
    one.flush()
    other.send(f.get(5, large))
    assert len(other.requests()) == 2
    other.core.eof(other.now_ns)
    assert shared.header_bytes == 0


def test_heads_that_never_come_to_their_end() -> None:
    shared = Shared()
    config: dict[str, Any] = {"max_buffered_header_bytes": 65_536}
    fragment = f.frame(f.CONTINUATION, 0, 1, bytes(16_000))
    patient = [Raw(shared=shared, **config) for _ in range(4)]
    for raw in patient:
        raw.send(f.headers(1, flags=0), fragment)
    assert shared.header_bytes > 64_000
    greedy = Raw(shared=shared, **config)
    greedy.send(f.headers(1, flags=0), fragment)
    assert (greedy.goaway, shared.limits["header_bytes"]) == (code.ENHANCE_YOUR_CALM, 1)
    assert all(raw.healthy for raw in patient)
    for raw in (*patient, greedy):
        raw.core.eof(raw.now_ns)
        raw.core.release()
    assert shared.header_bytes == 0


# HTTP/1.1


@pytest.mark.parametrize(
    ("limit", "sent", "seconds"),
    [
        ("header_timeout", GET[:10], 11), ("body_timeout", post(b"12345678")[:-3], 61), ("preface_timeout", b"", 11),
        ("body_size", post(bytes(2000)), 0), ("header_list", GET[:-2] + b"x: " + b"y" * 5000 + b"\r\n\r\n", 0),
    ],
)  # fmt: skip
def test_limits_of_http1(limit: str, sent: bytes, seconds: float) -> None:
    wire = Wire(max_body_bytes=1000, max_header_list_bytes=4096)
    wire.receive(sent)
    if seconds:
        wire.now += int(seconds * 1e9)
        wire.core.tick(wire.now)
    assert {name for name, count in wire.shared.limits.items() if count} == {limit}


def test_an_idle_connection_of_http1() -> None:
    wire = Wire()
    wire.request().whole(200, (), b"")
    wire.flush()
    wire.now += int(301e9)
    wire.core.tick(wire.now)
    assert wire.shared.limits["idle_timeout"] == 1


def test_heads_of_http1_count_while_they_are_not_complete() -> None:
    wire = Wire(max_buffered_header_bytes=65_536)
    wire.receive(GET[:-4] + b"\r\nx: ")
    assert wire.shared.header_bytes == len(GET) - 2 + 3
    wire.shared.header_bytes += 65_536  # of others
    wire.receive(b"y")
    wire.flush()
    assert wire.sent.startswith(b"HTTP/1.1 503 ")
    assert (wire.shared.header_bytes, wire.shared.limits["header_bytes"]) == (65_536, 1)


def test_what_an_http1_client_sends_ahead_counts_too() -> None:
    wire = Wire(max_buffered_header_bytes=65_536)
    reply = wire.request()
    wire.receive(bytes(30_000))
    assert wire.shared.header_bytes == 30_000
    wire.shared.header_bytes += 40_000  # of others
    wire.receive(bytes(10))
    assert (wire.shared.header_bytes, wire.shared.limits["header_bytes"]) == (40_000, 1)
    reply.whole(200, (), b"answered all the same")
    wire.flush()
    assert wire.sent.endswith(b"answered all the same")
    assert wire.core.closing


# Connections


def test_connections_of_one_network() -> None:
    config = ProtocolConfig(max_connections_per_address=2, max_connections=5)
    shared = Shared()
    assert [shared.arrived(f"10.0.0.1:{port}", config) for port in range(3)] == [True, True, False]
    assert shared.arrived("[2001:db8::1]:5", config)
    assert shared.arrived("[2001:db8::2]:5", config)
    assert not shared.arrived("[2001:db8::3]:5", config)
    assert (shared.limits["connections_per_address"], shared.limits["connections"]) == (2, 0)
    for port in range(3):
        shared.left(f"10.0.0.1:{port}")
    for host in (1, 2, 3):
        shared.left(f"[2001:db8::{host}]:5")
    assert (shared.connections, shared.networks) == (0, {})
    assert all(shared.arrived("unix", config) for _ in range(5)), "who has no address has no share"
    assert not shared.arrived("unix", config)


def test_no_limit_for_an_address() -> None:
    shared, config = Shared(), ProtocolConfig(max_connections_per_address=0)
    assert all(shared.arrived("10.0.0.1:1", config) for _ in range(5000))
    assert not shared.networks


def test_names_are_a_closed_list() -> None:
    assert set(BUCKETS) | set(CASES) <= set(LIMITS)
    with pytest.raises(KeyError):
        Shared().hit("nonsense")
