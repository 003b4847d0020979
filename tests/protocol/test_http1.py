"""The HTTP/1.1 core without a socket: turns, readers that are slow or leave, drain, rows, and any order of calls."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evap.protocol.events import PeerGone, StreamCancelled, WindowOpened
from evap.protocol.http1 import TRANSITIONS, Input, Phase
from evap.protocol.http1_reply import Http1Reply, chunk
from tests.protocol.http1_wire import CONFIG, GET, JSON, SSE, Wire, post, read, status_of


def test_pipelined_requests_are_answered_one_after_the_other() -> None:
    wire = Wire()
    wire.receive(post(b"1") + post(b"2") + post(b"3"))
    for n in (b"1", b"2", b"3"):
        assert wire.requests[-1].body == n
        count = len(wire.requests)
        wire.reply().whole(200, JSON, n)
        assert len(wire.requests) == count  # parsed when the answer has been taken
        assert read(wire.flush())[2] == n
    assert len(wire.requests) == 3


def test_the_next_request_waits_until_the_reader_has_taken_the_answer() -> None:
    wire = Wire()
    wire.receive(GET + GET)
    wire.reply().whole(200, JSON, b"x" * 1000)
    wire.flush(room=10)
    assert len(wire.requests) == 1
    wire.flush()
    assert len(wire.requests) == 2


def test_what_is_sent_too_far_ahead_is_dropped_and_the_connection_closes() -> None:
    wire = Wire(stream_window_bytes=65_535)
    reply = wire.request()
    for _ in range(100):
        wire.receive(post(b"x" * 1000))
    assert len(wire.core._reader.pending) == 0
    reply.whole(200, JSON, b"{}")
    assert read(wire.flush())[1]["connection"] == "close"
    assert wire.core.closing
    assert len(wire.requests) == 1


def test_a_stalled_reader_is_cancelled_and_cut_off() -> None:
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    reply.send(b"x" * 100_000)
    assert reply.buffered == 0
    wire.flush(room=1000)
    assert reply.buffered > 90_000
    before = reply.buffered
    reply.send(b"y" * 10)
    assert reply.buffered == before + len(chunk(b"y" * 10))
    wire.pass_s(CONFIG.stall_timeout_s - 1)
    wire.flush(room=2000)  # it takes something: the deadline starts anew
    wire.pass_s(CONFIG.stall_timeout_s - 1)
    wire.flush(room=2)  # next to nothing: it does not
    assert not wire.cancelled
    wire.pass_s(1)
    assert wire.cancelled == ["stalled"]
    assert wire.core.deadline_ns <= wire.now
    assert not reply.alive
    assert wire.core.closing
    assert wire.core.aborting
    assert wire.core.take_output() == []
    reply.send(b"ignored")
    assert wire.eof() == [PeerGone()]
    assert wire.cancelled == ["stalled"]


def test_window_opened_when_the_reader_has_caught_up() -> None:
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    reply.send(b"x" * 1000)
    wire.flush(room=10)
    assert not wire.core.writable
    assert not wire.core.take_rows(chunk(b"row"), 1, 3)
    assert wire.core.connection_window == 0
    wire.flush(room=10)
    assert WindowOpened(reply) not in wire.events
    wire.flush()
    assert wire.events[-1] == WindowOpened(reply)
    assert reply.buffered == 0
    assert wire.core.writable
    assert wire.core.connection_window > 0
    wire.flush()
    assert wire.events.count(WindowOpened(reply)) == 1


# Ends


def test_a_client_that_leaves_cancels_its_response_once() -> None:
    wire = Wire()
    reply = wire.request()
    assert wire.eof() == [StreamCancelled(reply, "client_gone"), PeerGone()]
    assert wire.eof() == []
    assert not reply.alive
    reply.start(200, SSE)
    reply.whole(200, JSON, b"{}")
    reply.end()
    reply.abort()
    assert wire.core.take_output() == []
    assert wire.core.closing


def test_a_client_that_half_closes_still_gets_what_was_answered_at_once() -> None:
    wire = Wire()
    wire.request().whole(200, JSON, b"{}")
    assert wire.eof() == [PeerGone()]
    assert read(wire.flush())[2] == b"{}"
    assert wire.core.closing


def test_leaving_before_the_answer_was_taken_is_a_cancel() -> None:
    wire = Wire()
    reply = wire.request()
    reply.whole(200, JSON, b"x" * 1000)
    wire.flush(room=10)
    wire.eof()
    assert wire.cancelled == ["client_gone"]
    assert reply.buffered > 0, "what was never taken is not delivered"


def test_stop_cancels_what_still_runs() -> None:
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    assert wire.core.stop(wire.now) == [StreamCancelled(reply, "drain")]
    assert wire.core.closing
    assert wire.eof() == [PeerGone()]


def test_drain() -> None:
    idle, arriving, half_head, running = Wire(), Wire(), Wire(), Wire()
    arriving.receive(post(b"abc")[:-1])
    half_head.receive(GET[:10])
    reply = running.request()
    reply.start(200, SSE)
    for wire in (idle, arriving, half_head, running):
        wire.shared.draining = True
        wire.core.drain(wire.now)
    assert idle.core.closing
    assert status_of(arriving) == (503, "draining")
    half_head.receive(GET[10:])
    assert status_of(half_head) == (503, "draining")
    assert not running.core.closing
    reply.send(b"data: 1\n\n")
    reply.end()
    assert read(running.flush())[2] == b"data: 1\n\n"
    assert running.core.closing


# Rows


class Rows:
    def __init__(self) -> None:
        self.released: list[Http1Reply] = []

    def release(self, reply: Http1Reply) -> None:
        self.released.append(reply)


def test_rows_append_ready_chunks_in_order() -> None:
    wire = Wire()
    reply = wire.request()
    wire.core.rows = rows = Rows()
    assert wire.core.acquire(reply) is None  # its head is not out
    reply.start(200, SSE)
    reply.send(b"first")
    window = wire.core.acquire(reply)
    assert window is not None
    assert window > 1 << 30
    wire.core.on_rows(reply.stream_id, True)
    row = bytearray(chunk(b"row 1") + chunk(b"row 2"))
    assert wire.core.take_rows(memoryview(row), 2, len(row))
    assert wire.core.take_rows(chunk(b"row 3"), 1, 5)
    wire.core.spend(reply.stream_id, len(row))
    reply.send(b"last")
    reply.end()
    assert rows.released.count(reply) >= 2
    assert read(wire.flush())[2] == b"firstrow 1row 2row 3last"
    assert wire.core.acquire(reply) is None
    assert wire.core.connection_window == 0


def test_rows_go_straight_to_an_idle_transport() -> None:
    wire, wrote, calls = Wire(), list[bytes](), list[int]()
    reply = wire.request()
    reply.start(200, SSE)
    queued = 0

    def direct(data: bytes | memoryview) -> int:
        wrote.append(bytes(data))
        return queued

    wire.core.direct = direct
    assert wire.core.take_rows(b"after the head", 1, 0)
    assert not wrote  # the head has to go first
    wire.flush()
    wire.core.wake = lambda: calls.append(1)
    assert wire.core.take_rows(b"row 1", 1, 0)
    assert (wrote, calls) == ([b"row 1"], [])
    queued = 3
    assert wire.core.take_rows(b"row 2", 1, 0)
    assert (wrote, calls) == ([b"row 1", b"row 2"], [1])  # somebody has to tell `written` what is queued
    assert wire.core.take_output() == []


def test_wake_is_called_when_there_is_something_to_write() -> None:
    wire, calls = Wire(), []
    wire.core.wake = lambda: calls.append(1)
    reply = wire.request()
    assert not calls
    reply.start(200, SSE)
    reply.send(b"x")
    assert calls
    calls.clear()
    reply.abort()
    assert calls


# The table, and anything at all


def test_every_transition() -> None:
    assert {(p, Input.LOST) for p in Phase} <= set(TRANSITIONS)
    assert {p for p, i in TRANSITIONS if i is Input.REQUEST} == {Phase.READ}
    assert {p for p, i in TRANSITIONS if i is Input.NEXT} == {Phase.REPLY}
    assert all((p, Input.CLOSE) in TRANSITIONS for p in Phase)
    assert {to for (p, _), to in TRANSITIONS.items() if p is Phase.GONE} == {Phase.GONE}


PIECES = st.one_of(
    st.sampled_from([GET, post(b"abc"), post(b"abc", b"Expect: 100-continue"), b"\r\n", b"GET / HTTP/1.0\r\n\r\n",
                     b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]),
    st.binary(max_size=20),
)  # fmt: skip
CALLS = ["start", "send", "end", "whole", "abort", "refuse", "eof", "drain", "stop", "row"]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("receive"), PIECES),
        st.tuples(st.sampled_from(CALLS), st.none()),
        st.tuples(st.just("flush"), st.sampled_from([None, 0, 5, 200])),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 11.0, 31.0, 400.0])),
    ),
    max_size=30,
)


@given(ACTIONS)
def test_any_order_of_calls_keeps_the_contract(actions: list[tuple[str, Any]]) -> None:
    wire = Wire()
    gone = False
    for name, value in actions:
        reply = wire.reply() if wire.requests else None
        if name == "receive" and not gone:
            wire.receive(value)
        elif name == "flush":
            wire.flush(value)
        elif name == "pass":
            wire.pass_s(value)
        elif name == "eof":
            wire.eof()
            gone = True
        elif name == "stop":
            wire._note(wire.core.stop(wire.now))
        elif name == "drain":
            wire.shared.draining = True
            wire.core.drain(wire.now)
        elif reply is not None:
            _use(wire, reply, name)
        _check(wire)
    wire.eof()
    _check(wire)
    assert wire.shared.body_bytes == 0
    assert wire.core.open_replies == 0
    assert sum(isinstance(e, PeerGone) for e in wire.events) == 1


def _use(wire: Wire, reply: Http1Reply, name: str) -> None:
    match name:
        case "start":
            reply.start(200, SSE)
        case "send":
            reply.send(b"data: x\n\n")
        case "end":
            reply.end()
        case "whole":
            reply.whole(200, JSON, b"{}")
        case "abort":
            reply.abort()
        case "refuse":
            reply.refuse()
        case "row":
            if reply.alive and wire.core.acquire(reply) is not None and wire.core.connection_window:
                assert wire.core.take_rows(chunk(b"row"), 1, 3)


def _check(wire: Wire) -> None:
    cancelled = [e.reply for e in wire.events if isinstance(e, StreamCancelled)]
    assert len(cancelled) == len({id(r) for r in cancelled})
    assert not any(r.alive for r in cancelled)
    alive = [r for r in wire.requests if r.reply.alive]
    assert len(alive) <= 1
    assert wire.core.open_replies == len(alive)
    assert wire.core.closing or wire.core.phase is not Phase.GONE
