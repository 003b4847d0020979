"""The shell: what it writes and when, how connections begin and end, and that no bug leaves its connection."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from evap.protocol.events import Event, PeerGone, RequestReady, StreamCancelled
from evap.protocol.limits import to_ns
from evap.protocol.transport import Hub, ServerProtocol
from tests.protocol import frames as f
from tests.protocol.fake_transport import FakeTransport
from tests.protocol.joined import HIGH_WATER, configured, split
from tests.protocol.serving import App

H1 = b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n"
STREAM = [*f.GET[:3], (b":path", b"/stream")]


class Bench:
    """A hub on a loop that the test turns by hand, with a clock of its own."""

    def __init__(self, **changes: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.now_ns = to_ns(1000)
        self.app = App()
        self.hub = Hub(configured(**changes), on_event=self.app.on_event, loop=self.loop, clock=lambda: self.now_ns)

    def connect(self, *data: bytes, **extra: Any) -> tuple[ServerProtocol, FakeTransport]:
        protocol = self.hub.protocol()
        transport = FakeTransport(protocol, **extra)
        protocol.connection_made(transport)
        for piece in data:
            protocol.data_received(piece)
        return protocol, transport

    def turn(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    def later(self, seconds: float) -> None:
        self.now_ns += to_ns(seconds)
        self.hub._tick()

    def close(self) -> None:
        self.hub.close()
        self.loop.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    its = Bench()
    yield its
    its.close()


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


@pytest.mark.parametrize("cut", [1, 3, 23, 24, 30])
def test_the_preface_decides_however_it_comes(bench: Bench, cut: int) -> None:
    wire = f.hello() + f.post(1, b"echo")
    _, transport = bench.connect(wire[:cut], wire[cut:])
    assert b"echo" in bytes(transport.written)
    assert split(bytes(transport.written))[0].type == f.SETTINGS


@pytest.mark.parametrize("first", [b"G", b"P", b"PRI", b"PRI * HTTP/2.0\r\n"])
def test_until_it_is_clear_nothing_is_answered(bench: Bench, first: bytes) -> None:
    protocol, transport = bench.connect(first)
    if not f.PREFACE.startswith(first):
        return
    assert not transport.written
    assert not bench.app.events
    protocol.data_received(b"POST / nonsense\r\n\r\n")
    assert bytes(transport.written).startswith(b"HTTP/1.1 4") or bytes(transport.written).startswith(b"HTTP/1.1 5")


def test_http_1_is_recognised(bench: Bench) -> None:
    _, transport = bench.connect(H1)
    assert bytes(transport.written).startswith(b"HTTP/1.1 200 OK\r\n")


def test_one_write_for_all_that_a_read_brings(bench: Bench) -> None:
    _, transport = bench.connect(f.hello())
    before = transport.writes
    bench.hub.live.copy().pop().data_received(b"".join(f.post(sid, b"x") for sid in range(1, 61, 2)))
    assert len([e for e in bench.app.events if isinstance(e, RequestReady)]) == 30
    assert transport.writes == before + 1


def test_one_write_for_all_that_happens_in_a_loop_pass(bench: Bench) -> None:
    _, transport = bench.connect(f.hello(), *[f.headers(sid, STREAM, end=True) for sid in (1, 3, 5)])
    before = transport.writes
    for reply in bench.app.streams:
        reply.send(b"token")
        reply.send(b"token")
    assert transport.writes == before
    bench.turn()
    assert transport.writes == before + 1
    assert transport.written.count(b"tokentoken") == 3
    bench.turn()
    assert transport.writes == before + 1


def test_a_step_is_flushed_by_hand_and_not_again(bench: Bench) -> None:
    _, one = bench.connect(f.hello(), f.headers(1, STREAM, end=True))
    _, two = bench.connect(f.hello(), f.headers(1, STREAM, end=True))
    before = one.writes + two.writes
    for reply in bench.app.streams:
        reply.send(b"token")
    bench.hub.flush()
    assert one.writes + two.writes == before + 2
    bench.turn()
    assert one.writes + two.writes == before + 2


def test_nothing_is_read_while_too_much_waits_to_be_written(bench: Bench) -> None:
    protocol, transport = bench.connect(f.hello(), f.settings((4, 1 << 30)), f.window(0, 1 << 30))
    transport.holds = HIGH_WATER
    protocol.pause_writing()  # as transports do inside a write
    protocol.flush()
    assert not transport.reading
    protocol.data_received(f.headers(1, [*f.GET[:3], (b":path", b"/big")], end=True))
    held = len(transport.written)
    assert held < 1000
    transport.holds = 0
    protocol.resume_writing()
    assert transport.reading
    bench.turn()
    assert len(transport.written) > held + HIGH_WATER


def test_a_huge_answer_lets_other_connections_have_their_turn(bench: Bench) -> None:
    big = f.headers(1, [*f.GET[:3], (b":path", b"/big")], end=True) + f.headers(
        3, [*f.GET[:3], (b":path", b"/big")], end=True
    )
    _, transport = bench.connect(f.hello(), f.settings((4, 1 << 30)), f.window(0, 1 << 30), big)
    assert len(transport.written) < 5 * (HIGH_WATER + 20_000)
    for _ in range(10):
        bench.turn()
    assert len(transport.written) > 2 << 20


def test_end_of_file_is_the_end(bench: Bench) -> None:
    for wire in (f.hello() + f.headers(1, STREAM, end=True), b"GET /stream HTTP/1.1\r\nhost: h\r\n\r\n"):
        protocol, _ = bench.connect(wire)
        bench.app.events.clear()
        assert protocol.eof_received() is False
        assert kinds(bench.app.events) == ["StreamCancelled", "PeerGone"]
        protocol.connection_lost(None)
        assert kinds(bench.app.events) == ["StreamCancelled", "PeerGone"]
    assert bench.hub.shared.connections == 0
    assert bench.hub.live == set()


def test_what_was_answered_before_the_end_of_file_is_delivered(bench: Bench) -> None:
    protocol, transport = bench.connect(f.hello() + f.post(1, b"echo"))
    protocol.eof_received()
    assert b"echo" in bytes(transport.written)


def test_a_connection_that_breaks_cancels_its_streams(bench: Bench) -> None:
    protocol, _ = bench.connect(f.hello(), f.headers(1, STREAM, end=True), f.headers(3, STREAM, end=True))
    protocol.connection_lost(ConnectionResetError())
    gone = [e for e in bench.app.events if isinstance(e, StreamCancelled)]
    assert [event.reason for event in gone] == ["client_gone", "client_gone"]
    assert isinstance(bench.app.events[-1], PeerGone)
    for reply in bench.app.streams:
        reply.send(b"too late")
        reply.end()
    bench.turn()


def test_too_many_connections() -> None:
    bench = Bench(max_connections=2)
    one, _ = bench.connect(H1)
    bench.connect(H1)
    third, transport = bench.connect()
    assert bytes(transport.written).startswith(b"HTTP/1.1 503 ")
    assert transport.eof_written
    third.data_received(H1)
    assert bytes(transport.written).count(b"HTTP/1.1") == 1
    one.connection_lost(None)
    third.connection_lost(None)
    _, fourth = bench.connect(H1)
    assert bytes(fourth.written).startswith(b"HTTP/1.1 200 ")
    bench.close()


def test_drain_and_stop(bench: Bench) -> None:
    _, idle = bench.connect(f.hello())
    silent, quiet = bench.connect()
    _, busy = bench.connect(f.hello(), f.headers(1, STREAM, end=True))
    bench.hub.drain()
    assert quiet.eof_written
    assert not idle.eof_written  # its first GOAWAY is out; the last one follows a round trip later
    bench.later(0.6)
    assert idle.eof_written
    assert not busy.eof_written
    _, late = bench.connect(H1)
    assert bytes(late.written).startswith(b"HTTP/1.1 503 ")
    bench.hub.stop()
    assert bench.app.cancelled == ["drain"]
    assert busy.eof_written
    assert split(bytes(busy.written))[-1].type == f.GOAWAY
    silent.connection_lost(None)


def test_a_drained_connection_closes_when_its_last_answer_is_done(bench: Bench) -> None:
    _, transport = bench.connect(f.hello(), f.headers(1, STREAM, end=True))
    bench.hub.drain()
    bench.app.streams[0].end()
    bench.turn()
    assert not transport.eof_written
    assert bench.hub.unsent
    bench.later(0.6)
    assert split(bytes(transport.written))[-1].type == f.GOAWAY
    bench.later(0.6)
    assert transport.eof_written
    assert not bench.hub.unsent
    assert split(bytes(transport.written))[-1].type == f.GOAWAY


def test_deadlines_come_from_one_timer(bench: Bench) -> None:
    _, silent = bench.connect()
    _, partial = bench.connect(b"PRI")
    _, unsettled = bench.connect(f.PREFACE + f.settings())
    _, idle = bench.connect(f.hello())
    bench.later(9)
    assert not any(t.is_closing() for t in (silent, partial, unsettled, idle))
    bench.later(2)
    assert silent.aborted
    assert partial.aborted
    assert unsettled.eof_written
    assert not idle.eof_written
    bench.later(300)
    assert idle.eof_written


def test_who_does_not_close_after_our_last_word_is_cut_off(bench: Bench) -> None:
    protocol, transport = bench.connect(f.hello(), f.frame(f.PING, 0, 1, bytes(8)))
    assert transport.eof_written
    assert transport.reading
    protocol.data_received(f.get(1) * 100)
    assert kinds(bench.app.events) == []
    bench.later(0.5)
    assert not transport.aborted
    bench.later(1.0)
    assert transport.aborted


def test_a_stalled_transport_is_cut_off_at_once(bench: Bench) -> None:
    protocol, transport = bench.connect(f.hello(), f.headers(1, STREAM, end=True))
    transport.holds = 1000
    bench.app.streams[0].send(b"token")
    bench.turn()
    bench.later(31)
    assert bench.app.cancelled == ["stalled"]
    assert transport.aborted
    protocol.connection_lost(None)


def test_a_bug_in_a_handler_costs_its_connection_only(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    _, other = bench.connect(f.hello(), f.headers(1, STREAM, end=True))
    bug = f.headers(3, [*f.GET[:3], (b":path", b"/bug")], end=True)
    protocol, transport = bench.connect(f.hello(), f.headers(1, STREAM, end=True), bug + f.headers(5, STREAM, end=True))
    assert transport.aborted
    assert "a bug in the application" in caplog.text
    assert len(bench.app.streams) == 3  # the event after the one that failed came too
    protocol.connection_lost(None)
    assert bench.app.cancelled == ["client_gone"] * 3
    bench.app.streams[0].send(b"unhurt")
    bench.turn()
    assert b"unhurt" in bytes(other.written)


def test_a_bug_in_a_core_costs_its_connection_only(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    protocol, transport = bench.connect(f.hello(), f.headers(1, STREAM, end=True))
    protocol._core.inbound.receive = None  # type: ignore[union-attr,method-assign]
    protocol.data_received(f.ping())
    assert transport.aborted
    assert "ended by an error of ours" in caplog.text


def test_addresses_reach_the_request(bench: Bench) -> None:
    bench.connect(f.hello(), f.get(1))
    [ready] = [e for e in bench.app.events if isinstance(e, RequestReady)]
    assert ready.head.peer == "192.0.2.1:4711"


def test_much_input_is_handled_in_turns(bench: Bench) -> None:
    """One read of 300 requests: others come in between, nothing is lost, and what the same read resets is not handed
    over."""
    greedy, transport = bench.connect(f.hello(), b"".join(f.post(sid) for sid in range(1, 301, 2)) + f.rst(1))
    assert not transport.reading
    assert kinds(bench.app.events) == []
    _, other = bench.connect(f.hello(), f.post(1, b"another"))
    assert b"another" in bytes(other.written)
    assert kinds(bench.app.events) == ["RequestReady"]
    for _ in range(3):
        bench.turn()
    assert transport.reading
    assert kinds(bench.app.events) == ["RequestReady"] * 150  # the other's, and 149 of 150
    greedy.data_received(f.post(303, b"later"))
    assert b"later" in bytes(transport.written)


def test_input_in_turns_waits_for_a_reader_too(bench: Bench) -> None:
    """Reading goes on only when nothing stands against it."""
    protocol, transport = bench.connect(f.hello(), b"".join(f.window(0, 1) for _ in range(300)))
    protocol.pause_writing()
    bench.turn()
    bench.turn()
    assert not transport.reading
    protocol.resume_writing()
    assert transport.reading


def test_a_client_that_leaves_while_its_input_waits(bench: Bench) -> None:
    protocol, transport = bench.connect(f.hello(), b"".join(f.post(sid) for sid in range(1, 301, 2)))
    assert not transport.reading
    protocol.connection_lost(None)
    bench.turn()
    assert kinds(bench.app.events) == ["PeerGone"]
    assert bench.hub.shared.body_bytes == 0


def test_a_connection_that_is_gone_leaves_no_garbage(bench: Bench) -> None:
    """A flood of connections would make the collector's pauses long."""
    gc.collect()
    gc.disable()
    try:
        protocol, transport = bench.connect(f.hello(), f.post(1), f.headers(3, STREAM, end=True), f.get(5), f.data(5))
        core = weakref.ref(protocol._core)
        protocol.connection_lost(None)
        bench.app.events.clear()
        bench.app.streams.clear()
        transport.protocol = asyncio.Protocol()
        del protocol
        assert core() is None
    finally:
        gc.enable()
