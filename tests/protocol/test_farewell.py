"""How a draining connection ends: two GOAWAYs, and never under a running stream."""

from __future__ import annotations

import pytest

from evap.protocol import headers as code
from tests.protocol import frames as f
from tests.protocol.joined import Raw


def goaways(raw: Raw) -> list[int]:
    """Last stream ids of the GOAWAYs that were sent."""
    return [out.number for out in raw.out if out.type == f.GOAWAY]


@pytest.mark.parametrize("answers", [True, False], ids=["ping-answered", "silent"])
def test_goaway_comes_in_two_steps(answers: bool) -> None:
    """RFC 9113 6.8: first with the highest id; the last one when the client has read that, or has had time to."""
    raw = Raw()
    raw.core.drain(raw.now_ns)
    raw.flush()
    assert [out.type for out in raw.out] == [f.PING, f.GOAWAY]
    assert goaways(raw) == [(1 << 31) - 1]
    raw.send(f.headers(1, end=True))  # it was on its way
    assert raw.requests() == []
    assert raw.resets(1) == [code.REFUSED_STREAM]
    raw.send(f.frame(f.PING, f.ACK, 0, b"anything"))
    raw.wait(0.1)
    assert not raw.core.closing
    if answers:
        raw.send(f.frame(f.PING, f.ACK, 0, raw.out[0].payload))
    else:
        raw.wait(0.5)
    assert goaways(raw) == [(1 << 31) - 1, 1]
    assert raw.core.closing


def test_no_goaway_under_a_running_stream() -> None:
    raw = Raw()
    raw.send(f.headers(1, end=True))
    raw.core.drain(raw.now_ns)
    raw.wait(20)
    assert goaways(raw) == []
    raw.core.streams[1].whole(200, (), b"the answer")
    raw.flush()
    assert goaways(raw) == []  # not in the same read as the end of an answer
    raw.wait(0.5)
    raw.wait(0.5)
    assert goaways(raw) == [(1 << 31) - 1, 1]


def test_a_client_that_leaves_is_told_goodbye_once_its_last_stream_is_done() -> None:
    raw = Raw()
    raw.send(f.headers(1, end=True))
    raw.send(f.goaway())
    assert goaways(raw) == []
    raw.core.streams[1].whole(200, (), b"the answer")
    raw.flush()
    assert goaways(raw) == [1]
