"""Outbound data: every octet, in order, within the windows, and nobody starves."""

from __future__ import annotations

from collections import deque

import pytest
from h2.events import DataReceived, StreamEnded, TrailersReceived
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.protocol.events import WindowOpened
from evap.protocol.limits import MAX_DATA_FRAME
from evap.protocol.outbox import take
from tests.protocol import frames as f
from tests.protocol.joined import Joined, Raw


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=10), st.data())
def test_take(chunks: list[bytes], data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from([bytes, bytearray, memoryview]), min_size=10, max_size=10))
    queue: deque[bytes | bytearray | memoryview] = deque(
        kind(chunk) for kind, chunk in zip(kinds, chunks, strict=False)
    )
    whole, got = b"".join(chunks), b""
    while len(got) < len(whole):
        piece = take(queue, data.draw(st.integers(1, len(whole) - len(got))))
        assert type(piece) is bytes
        got += piece
    assert got == whole
    assert not queue


def test_what_a_slow_reader_has_not_taken_is_one_piece_of_many_events() -> None:
    joined = Joined(client={4: 100})
    sid = joined.request()
    reply = joined.reply(sid)
    reply.start(200, [])
    events = [b"event %05d of many;" % n * 10 for n in range(300)]
    for event in events:
        reply.send(event)
        joined.pump()
    queue = joined.core.streams[sid].queue
    assert len(queue) <= 2 + sum(map(len, events)) // MAX_DATA_FRAME
    assert sum(map(len, queue)) == reply.buffered
    reply.end()
    joined.client.increment_flow_control_window(1 << 20, sid)
    joined.client.increment_flow_control_window(1 << 20)
    joined.pump()
    assert joined.received(sid) == b"".join(events)


def test_windows_of_one_octet_deliver_every_octet() -> None:
    joined = Joined(client={4: 1})
    sid = joined.request()
    reply = joined.reply(sid)
    body = bytes(range(200))
    reply.start(200, [])
    reply.send(body)
    reply.end()
    joined.pump()
    while len(joined.received(sid)) < len(body):
        assert len(joined.received(sid)) + reply.buffered == len(body)
        joined.client.increment_flow_control_window(1, sid)
        joined.pump()
    assert joined.received(sid) == body
    assert joined.of(StreamEnded, sid)
    assert all(event.flow_controlled_length == 1 for event in joined.of(DataReceived, sid))


def test_the_last_frame_carries_the_end() -> None:
    raw = Raw()
    raw.send(f.get(1), f.get(3), f.get(5))
    for request in raw.requests():
        request.reply.start(200, [])
    one, two, three = (request.reply for request in raw.requests())
    one.send(b"a")
    one.send(b"b")
    one.end()
    two.end()
    three.send(b"c")
    raw.flush()
    three.end()
    raw.flush()
    data = [(o.sid, o.payload, o.flags) for o in raw.out if o.type == f.DATA]
    assert data == [(1, b"ab", 1), (3, b"", 1), (5, b"c", 0), (5, b"", 1)]


def test_pieces_of_one_flush_share_a_frame_and_frames_stay_small() -> None:
    raw = Raw()
    raw.send(f.settings((5, 1 << 20), (4, 1 << 24)), f.window(0, 1 << 24), f.get(1))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    for _ in range(100):
        reply.send(bytes(1000))
    raw.flush()
    sizes = [len(o.payload) for o in raw.out if o.type == f.DATA]
    assert max(sizes) == MAX_DATA_FRAME
    assert len(sizes) == -(-100_000 // MAX_DATA_FRAME)


def test_streams_take_turns() -> None:
    raw = Raw()
    raw.send(f.settings((4, 1 << 24)), f.window(0, 1 << 24), f.get(1), f.get(3))
    big, small = (request.reply for request in raw.requests())
    big.whole(200, [], bytes(10 * MAX_DATA_FRAME))
    small.whole(200, [], b"quick")
    raw.flush()
    assert [o.sid for o in raw.out if o.type == f.DATA][:2] == [1, 3]


def test_a_stream_without_window_holds_nobody_up() -> None:
    raw = Raw()
    raw.send(f.get(1), f.get(3), f.window(0, 1 << 20))
    stuck, free = (request.reply for request in raw.requests())
    stuck.whole(200, [], bytes(100_000))
    free.whole(200, [], b"free")
    raw.flush()
    assert len(raw.body(1)) == 65_535
    assert raw.body(3) == b"free"
    assert stuck.buffered == 100_000 - 65_535


def test_trailers_come_after_everything() -> None:
    joined = Joined(client={4: 10})
    sid = joined.request()
    reply = joined.reply(sid)
    reply.start(200, [])
    reply.send(bytes(25))
    reply.end([(b"x-usage", b"25")])
    joined.pump()
    assert not joined.of(TrailersReceived)
    joined.client.increment_flow_control_window(15, sid)
    joined.pump()
    assert joined.received(sid) == bytes(25)
    assert [event.headers for event in joined.of(TrailersReceived, sid)] == [[(b"x-usage", b"25")]]
    assert joined.of(StreamEnded, sid)


@pytest.mark.parametrize(
    "opener", [f.window(1, 100_000) + f.window(0, 100_000), f.settings((4, 200_000)) + f.window(0, 99_999)]
)
def test_window_opened_comes_once_when_all_is_gone(opener: bytes) -> None:
    raw = Raw()
    raw.send(f.get(1))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    reply.send(b"fits")
    raw.flush()
    assert not [e for e in raw.events if isinstance(e, WindowOpened)]
    reply.send(bytes(100_000))
    raw.flush()
    raw.send(f.window(1, 10))
    assert not [e for e in raw.events if isinstance(e, WindowOpened)]
    raw.send(opener)
    assert [e.reply for e in raw.events if isinstance(e, WindowOpened)] == [reply]
    assert reply.buffered == 0


def test_an_ended_reply_is_told_when_all_was_taken() -> None:
    """Whoever waits to settle it hears of it at once, as over HTTP/1.1."""
    raw = Raw()
    raw.send(f.get(1))
    raw.requests()[0].reply.whole(200, [], bytes(100_000))
    raw.flush()
    raw.send(f.window(1, 100_000), f.window(0, 100_000))
    assert len(raw.body(1)) == 100_000
    assert len([e for e in raw.events if isinstance(e, WindowOpened)]) == 1


def test_output_stops_at_what_the_transport_takes_and_goes_on_when_it_drains() -> None:
    raw = Raw()
    raw.send(f.settings((4, 1 << 30)), f.window(0, 1 << 30), f.get(1))
    raw.requests()[0].reply.whole(200, [], bytes(3 << 20))
    for _ in range(20):
        out = b"".join(raw.core.take_output())
        assert len(out) <= (256 << 10) + MAX_DATA_FRAME + 9
        raw.core.written(256 << 10, raw.now_ns)
        assert raw.core.take_output() == []
        raw.core.written(0, raw.now_ns)
        if not raw.core.streams:
            break
    assert not raw.core.streams


SCRIPT = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 3), st.integers(1, 30_000)),
        st.tuples(st.just("open"), st.integers(0, 3), st.integers(1, 40_000)),
        st.tuples(st.just("connection"), st.just(0), st.integers(1, 80_000)),
        st.tuples(st.just("initial"), st.just(0), st.integers(0, 60_000)),
        st.tuples(st.just("end"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)


@given(SCRIPT)
@settings(max_examples=60)
def test_both_ends_agree_on_every_window(script: list[tuple[str, int, int]]) -> None:
    """h2 as the client raises if we overrun a window; afterwards its books and ours are the same, octet for octet."""
    joined = Joined(client={4: 1000})
    sids = [joined.request() for _ in range(4)]
    replies = [joined.reply(sid) for sid in sids]
    sent = dict.fromkeys(sids, b"")
    for reply in replies:
        reply.start(200, [])
    for number, (what, index, size) in enumerate(script):
        sid, reply = sids[index], replies[index]
        if what == "send" and reply.alive:
            reply.send(bytes((number,)) * size)
            sent[sid] += bytes((number,)) * size
        elif what == "open" and sid in joined.core.streams:
            joined.client.increment_flow_control_window(size, sid)
        elif what == "connection":
            joined.client.increment_flow_control_window(size)
        elif what == "initial":
            joined.client.update_settings({4: size})
        elif what == "end" and joined.core.stream_window(sid) >= 0:
            # RFC 9113 6.9.1 lets an empty DATA pass a window below zero; h2 as a client does not
            reply.end()
        joined.pump()
        assert joined.core.connection_window == joined.client.inbound_flow_control_window
        for sid, reply in zip(sids, replies, strict=True):
            assert joined.received(sid) == sent[sid][: len(joined.received(sid))]
            assert len(joined.received(sid)) + reply.buffered == len(sent[sid])
            if sid in joined.core.streams:
                window = joined.client.streams[sid].inbound_flow_control_window
                assert joined.core.stream_window(sid) == window
                assert not reply.buffered or min(window, joined.core.connection_window) <= 0
