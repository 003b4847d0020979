"""RFC 9218 over real frames: who is written first, and what a PRIORITY_UPDATE changes."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.protocol.events import PriorityChanged
from evap.protocol.limits import MAX_DATA_FRAME
from tests.protocol import frames as f
from tests.protocol.joined import HIGH_WATER, Raw


def asked(raw: Raw, *values: bytes | None) -> list[int]:
    """One request per value of the priority field; their stream ids."""
    sids = [1 + 2 * number for number in range(len(values))]
    for sid, value in zip(sids, values, strict=True):
        raw.send(f.get(sid, *([(b"priority", value)] if value is not None else [])))
    for request in raw.requests():
        request.reply.start(200, [])
    raw.flush()
    raw.out.clear()
    return sids


def order(raw: Raw) -> list[int]:
    """Stream ids of the DATA frames so far, in runs."""
    return [sid for sid, _ in groupby(o.sid for o in raw.out if o.type == f.DATA)]


def test_the_lower_urgency_has_the_window_first() -> None:
    raw = Raw()
    raw.send(f.settings((4, 1 << 24)))
    asked(raw, b"u=5", None, b"u=0", b"u=0, i", b"u=9")
    for request in raw.requests():
        request.reply.send(bytes(2 * MAX_DATA_FRAME))
    raw.flush()  # 65,535 octets of window: the two urgent streams' 65,536 less one
    assert order(raw) == [5, 7, 5, 7]
    raw.out.clear()
    raw.send(f.window(0, 1 + MAX_DATA_FRAME * 3))
    assert order(raw) == [7, 3, 9, 3], "the one octet that was left, then equals in turns"
    raw.out.clear()
    raw.send(f.window(0, 1 << 20))
    assert order(raw) == [9, 1]


def test_a_short_socket_is_shared_by_urgency_too() -> None:
    raw = Raw()
    raw.send(f.settings((4, 1 << 24)), f.window(0, 1 << 24))
    asked(raw, b"u=7", b"u=1")
    background, urgent = (request.reply for request in raw.requests())
    background.send(bytes(4 * HIGH_WATER))
    raw.holds = HIGH_WATER
    raw.flush()
    raw.out.clear()
    urgent.send(b"now")
    raw.holds = 0
    raw.core.written(0, raw.now_ns)
    raw.flush()
    assert order(raw)[0] == 3


def test_an_update_moves_what_is_queued_and_is_told_to_whoever_has_the_request() -> None:
    raw = Raw()
    raw.send(f.settings((4, 1 << 24)), f.window(0, 1 << 24))
    asked(raw, None, None, b"u=1")
    raw.holds = HIGH_WATER  # nothing leaves
    raw.core.written(HIGH_WATER, raw.now_ns)
    for request in raw.requests():
        request.reply.send(bytes(MAX_DATA_FRAME))
    raw.flush()
    assert order(raw) == []
    new = raw.send(
        f.priority_update(3, b"u=0"), f.priority_update(5, b"not a dictionary)"), f.priority_update(1, b"u=7")
    )
    changed = [event for event in new if isinstance(event, PriorityChanged)]
    assert [(event.reply, event.value) for event in changed] == [
        (raw.requests()[1].reply, b"u=0"), (raw.requests()[2].reply, b"not a dictionary)"),
        (raw.requests()[0].reply, b"u=7"),
    ]  # fmt: skip
    raw.holds = 0
    raw.core.written(0, raw.now_ns)
    raw.flush()
    assert order(raw) == [3, 5, 1]
    assert raw.healthy


def test_an_update_before_the_request_goes_before_its_header() -> None:
    raw = Raw()
    raw.send(f.priority_update(1, b"u=2"), f.get(1, (b"priority", b"u=6")))
    assert raw.core.streams[1].urgency == 2
    assert raw.requests()[0].head.get(b"priority") == b"u=2"
    assert not [event for event in raw.events if isinstance(event, PriorityChanged)]


def test_an_update_while_the_body_comes_is_no_event_yet() -> None:
    raw = Raw()
    new = raw.send(f.headers(1), f.priority_update(1, b"u=0"))
    assert not new
    assert raw.core.streams[1].urgency == 0
    raw.send(f.data(1, b"{}", end=True))
    assert raw.requests()[0].head.get(b"priority") == b"u=0"
    raw.send(f.get(3, (b"priority", b"u=6")), f.priority_update(3, b"u=2"), f.get(5, (b"priority", b"u=6")))
    raw.send(f.post(7) + f.priority_update(7, b"u=5"))
    heads = [request.head.get(b"priority") for request in raw.requests()]
    assert heads == [b"u=0", b"u=2", b"u=6", b"u=5"], "in the same read, before anybody has it"
    raw.send(f.priority_update(99, b"u=0"), f.rst(1), f.priority_update(1, b"u=0"))
    assert raw.healthy


@settings(max_examples=50)
@given(st.data())
def test_no_octet_is_lost_whatever_moves(data: st.DataObject) -> None:
    raw = Raw()
    sids = asked(raw, *data.draw(st.lists(st.sampled_from([None, b"u=0", b"u=7"]), min_size=1, max_size=5)))
    sent = dict.fromkeys(sids, 0)
    for _ in range(data.draw(st.integers(1, 25))):
        sid = data.draw(st.sampled_from(sids))
        match data.draw(st.integers(0, 3)):
            case 0:
                size = data.draw(st.integers(1, 30_000))
                raw.core.streams[sid].send(b"x" * size)
                sent[sid] += size
                raw.flush()
            case 1:
                raw.send(f.priority_update(sid, b"u=%d" % data.draw(st.integers(0, 7))))
            case 2:
                raw.send(f.window(0, data.draw(st.integers(1, 50_000))))
            case 3:
                raw.send(f.window(sid, data.draw(st.integers(1, 50_000))))
    raw.send(f.window(0, 1 << 24), *[f.window(sid, 1 << 24) for sid in sids])
    assert {sid: len(raw.body(sid)) for sid in sids} == sent
    assert not raw.core.outbox.pending


@pytest.mark.parametrize("count", [3])
def test_equals_take_turns(count: int) -> None:
    raw = Raw()
    raw.send(f.settings((4, 1 << 24)), f.window(0, 1 << 24))
    asked(raw, *[b"u=2"] * count)
    for request in raw.requests():
        request.reply.send(bytes(3 * MAX_DATA_FRAME))
    raw.flush()
    assert order(raw) == [1, 3, 5] * 3
