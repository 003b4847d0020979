"""Deadlines, with a clock that moves when told to. What they protect from is in tests/conformance (4, 24, 33-37)."""

from __future__ import annotations

import pytest

from evap.protocol import headers as code
from evap.protocol.limits import NEVER, to_ns
from tests.protocol import frames as f
from tests.protocol.joined import Raw


def test_an_idle_connection_is_closed_with_goaway() -> None:
    raw = Raw(idle_timeout_s=300.0)
    raw.wait(299)
    raw.send(f.ping())
    raw.wait(299)
    assert raw.healthy
    raw.wait(2)
    assert raw.goaway == code.NO_ERROR
    assert raw.core.deadline_ns == NEVER


def test_a_connection_with_a_running_answer_is_not_idle() -> None:
    raw = Raw(idle_timeout_s=300.0)
    raw.send(f.get(1))
    raw.wait(1000)
    assert raw.healthy
    raw.requests()[0].reply.whole(200, [], b"")
    raw.flush()
    raw.wait(299)
    assert raw.healthy
    raw.wait(2)
    assert raw.goaway == code.NO_ERROR


@pytest.mark.parametrize("partial", [f.headers(1, flags=0), f.get(1)[:20], f.get(1)[:5]])
def test_a_head_that_does_not_come_to_its_end(partial: bytes) -> None:
    raw = Raw(header_timeout_s=10.0)
    raw.send(partial)
    raw.wait(9)
    assert raw.healthy
    raw.wait(2)
    assert raw.goaway == code.PROTOCOL_ERROR


def test_a_slow_body_frame_is_not_a_slow_head() -> None:
    raw = Raw(header_timeout_s=10.0, body_timeout_s=60.0)
    body = f.data(1, bytes(16_000), end=True)
    raw.send(f.headers(1), body[:100])
    raw.wait(30)
    raw.send(body[100:])
    assert len(raw.requests()) == 1
    assert raw.healthy


def test_progress_restarts_the_stall_clock() -> None:
    raw = Raw(greet=False, stall_timeout_s=30.0)
    raw.send(f.hello((4, 0)), f.get(1))
    reply = raw.requests()[0].reply
    reply.whole(200, [], bytes(100_000))
    raw.flush()
    for _ in range(10):
        raw.wait(20)
        raw.send(f.window(1, 2000))
    assert raw.cancelled() == []
    raw.wait(31)
    assert raw.cancelled() == ["stalled"]


def test_a_stalled_stream_leaves_the_others_alone() -> None:
    raw = Raw(stall_timeout_s=30.0)
    raw.send(f.get(1), f.get(3), f.window(0, 1 << 20))
    stuck, fine = (request.reply for request in raw.requests())
    stuck.whole(200, [], bytes(100_000))
    fine.start(200, [])
    raw.flush()
    raw.wait(31)
    assert raw.cancelled() == ["stalled"]
    assert fine.alive
    fine.send(b"still here")
    raw.flush()
    assert raw.body(3) == b"still here"


def test_a_slow_but_reading_client_keeps_its_connection() -> None:
    raw = Raw(stall_timeout_s=30.0)
    raw.send(f.settings((4, 1 << 30)), f.window(0, 1 << 30), f.get(1))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    reply.send(bytes(200_000))
    raw.holds = sum(map(len, raw.core.take_output()))
    for _ in range(20):
        raw.holds -= 1000
        raw.flush()
        raw.wait(20)
    assert raw.healthy
    raw.wait(31)
    assert raw.core.closing


def test_deadlines_are_armed_and_never_missed() -> None:
    """Whatever is waited for, `deadline_ns` is not later than its due time."""
    raw = Raw(body_timeout_s=5.0, stall_timeout_s=7.0, idle_timeout_s=100.0)
    raw.send(f.headers(1))
    assert raw.core.deadline_ns <= raw.now_ns + to_ns(5.0)
    raw.send(f.data(1, b"", end=True))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    reply.send(bytes(70_000))
    raw.flush()
    assert raw.core.deadline_ns <= raw.now_ns + to_ns(7.0)
    reply.abort()
    raw.flush()
    for _ in range(3):
        raw.wait(8)
    assert raw.healthy
    assert raw.now_ns < raw.core.deadline_ns <= raw.now_ns + to_ns(100.0)
