"""The HTTP/2 core from outside: requests, replies, drain, and the seam with the row buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset
from hypothesis import given
from hypothesis import strategies as st

from evap.protocol import headers as code
from evap.protocol.connection import Http2Core
from evap.protocol.events import PeerGone, RequestReady, StreamCancelled
from evap.protocol.spool import Body
from tests.protocol import frames as f
from tests.protocol.joined import Joined, Raw, configured


def test_a_request_and_its_answer() -> None:
    joined = Joined()
    sid = joined.request(b'{"a": 1}', [*f.POST, (b"x-a", b"1")])
    [event] = [e for e in joined.events if isinstance(e, RequestReady)]
    assert (event.head.method, event.head.path, event.head.version) == ("POST", "/v1/chat/completions", "2")
    assert (event.head.get(b"x-a"), event.body) == (b"1", b'{"a": 1}')
    event.reply.whole(201, [(b"content-type", b"text/plain")], b"answer")
    joined.pump()
    [response] = joined.of(ResponseReceived, sid)
    fields = dict(response.headers)
    assert fields.pop(b"date").endswith(b"GMT")
    assert fields == {
        b":status": b"201", b"content-type": b"text/plain", b"content-length": b"6", b"server": b"evap"
    }  # fmt: skip
    assert joined.received(sid) == b"answer"
    assert joined.of(StreamEnded, sid)
    assert (event.reply.alive, joined.core.open_replies) == (False, 0)


@pytest.mark.parametrize("status", [200, 204, 304])
def test_answers_without_a_body(status: int) -> None:
    joined = Joined()
    head = joined.request(None, [(b":method", b"HEAD"), *f.GET[1:]])
    get = joined.request(None, f.GET)
    joined.reply(head).whole(status, [], b"0123456789")
    joined.reply(get).whole(status, [], b"0123456789" if status == 200 else b"")
    joined.pump()
    assert joined.received(head) == b""
    assert joined.received(get) == (b"0123456789" if status == 200 else b"")
    lengths = [dict(event.headers).get(b"content-length") for event in joined.of(ResponseReceived)]
    assert lengths == ([b"10", b"10"] if status == 200 else [None, None])
    assert len(joined.of(StreamEnded)) == 2


def test_a_streamed_answer_to_head() -> None:
    joined = Joined()
    sid = joined.request(None, [(b":method", b"HEAD"), *f.GET[1:]])
    reply = joined.reply(sid)
    reply.start(200, [])
    reply.send(b"not this")
    reply.end()
    joined.pump()
    assert joined.received(sid) == b""
    assert joined.of(StreamEnded, sid)


def test_calls_in_the_wrong_order_do_no_harm() -> None:
    joined = Joined()
    one, two, three = (joined.reply(joined.request()) for _ in range(3))
    one.send(b"before start")
    one.start(200, [])
    one.start(500, [])
    one.whole(500, [], b"twice")
    one.end()
    for reply in (one,):
        reply.send(b"after end")
        reply.end()
        reply.abort()
        reply.refuse()
    two.end()  # never started: an abort
    three.start(200, [])
    three.refuse()  # too late to refuse: an abort
    joined.pump()
    assert joined.received(1) == b""
    assert [dict(e.headers)[b":status"] for e in joined.of(ResponseReceived)] == [b"200", b"200"]
    assert [(e.stream_id, int(e.error_code)) for e in joined.of(StreamReset)] == [(3, 2), (5, 2)]


def test_refuse_and_abort() -> None:
    joined = Joined()
    one, two = joined.request(), joined.request()
    joined.reply(one).refuse()
    reply = joined.reply(two)
    reply.start(200, [])
    reply.send(bytes(100_000))
    reply.abort()
    joined.pump()
    assert [(e.stream_id, int(e.error_code)) for e in joined.of(StreamReset)] == [
        (one, code.REFUSED_STREAM),
        (two, code.INTERNAL_ERROR),
    ]
    assert (reply.alive, reply.buffered) == (False, 0)
    assert not [e for e in joined.events if isinstance(e, StreamCancelled)]


def test_expect_100_continue() -> None:
    raw = Raw()
    raw.send(f.headers(1, (*f.POST, (b"expect", b"100-continue"))))
    assert raw.status(1) == 100
    raw.send(f.data(1, b"{}", end=True))
    raw.requests()[0].reply.whole(200, [], b"")
    raw.flush()
    assert len([o for o in raw.out if o.type == f.HEADERS]) == 2
    raw.send(f.headers(3, (*f.POST, (b"expect", b"100-continue"), (b"content-length", b"999999999"))))
    assert raw.status(3) == 413
    raw.send(f.headers(5, (*f.POST, (b"expect", b"a miracle"))))
    assert raw.status(5) == 417


def test_uploads_larger_than_the_windows_many_at_once() -> None:
    joined = Joined(stream_window_bytes=65_535, connection_window_bytes=65_535)
    bodies = {joined.client.get_next_available_stream_id() + 2 * n: bytes((n,)) * (200_000 + n) for n in range(8)}
    left = dict(bodies)
    for sid in bodies:
        joined.client.send_headers(sid, f.POST)
    while left:
        before = sum(map(len, left.values()))
        for sid, rest in list(left.items()):
            size = min(len(rest), joined.client.local_flow_control_window(sid), 10_000)
            joined.client.send_data(sid, rest[:size], end_stream=size == len(rest))
            left[sid] = rest[size:]
            if size == len(rest):
                del left[sid]
        joined.pump()
        assert sum(map(len, left.values())) < before
    got = {e.reply.stream_id: e.body for e in joined.events if isinstance(e, RequestReady)}
    assert got == bodies
    assert joined.core.shared.body_bytes == 0


def test_the_client_resets_or_goes() -> None:
    joined = Joined()
    one, two, three = joined.request(), joined.request(), joined.request()
    done, running = joined.reply(one), joined.reply(two)
    done.whole(200, [], b"complete")
    running.start(200, [])
    joined.pump()
    joined.client.reset_stream(two, 8)
    new = joined.pump()
    assert new == [StreamCancelled(running, "client_reset")]
    waiting = joined.reply(three)
    assert joined.core.eof(2) == [StreamCancelled(waiting, "client_gone"), PeerGone()]
    assert joined.core.eof(3) == []
    assert joined.core.receive(f.ping(), 4) == []
    assert not any(reply.alive for reply in (done, running, waiting))


def test_an_answer_that_is_still_queued_counts_as_not_delivered() -> None:
    joined = Joined()
    sid = joined.request()
    reply = joined.reply(sid)
    reply.whole(200, [], bytes(100_000))
    joined.pump()
    assert not reply.alive
    joined.client.reset_stream(sid, 8)
    buffered = reply.buffered
    assert joined.pump() == [StreamCancelled(reply, "client_reset")]
    assert reply.buffered == buffered > 0, "the account counts from it what was never sent"


# Drain


def test_drain_lets_answers_finish_and_says_goaway_last() -> None:
    joined = Joined()
    sid = joined.request()
    reply = joined.reply(sid)
    reply.start(200, [])
    joined.core.drain(2)
    joined.pump()
    late = joined.request()
    assert [(e.stream_id, int(e.error_code)) for e in joined.of(StreamReset)] == [(late, code.REFUSED_STREAM)]
    assert not joined.of(ConnectionTerminated)
    reply.send(b"the rest")
    reply.end()
    joined.pump()
    assert joined.received(sid) == b"the rest"
    assert not joined.of(ConnectionTerminated)  # not in the same read as the end of an answer
    for _ in range(2):  # h2 as a client throws its PING's answer away when it reads GOAWAY
        joined.now_ns = joined.core.deadline_ns
        joined.core.tick(joined.now_ns)
        joined.pump()
    byes = joined.of(ConnectionTerminated)
    assert [(int(bye.error_code), bye.last_stream_id) for bye in byes] == [(0, (1 << 31) - 1), (0, late)]
    assert joined.core.closing


def test_stop_of_a_busy_connection() -> None:
    busy = Joined()
    reply = busy.reply(busy.request())
    assert busy.core.stop(2) == [StreamCancelled(reply, "drain")]
    assert busy.core.stop(3) == []
    busy.pump()
    assert busy.core.closing
    assert int(busy.of(ConnectionTerminated)[0].error_code) == code.NO_ERROR


# Wake


def test_wake_is_called_for_what_is_done_outside_and_only_then() -> None:
    woken: list[int] = []
    raw = Raw()
    raw.core.wake = lambda: woken.append(1)
    raw.send(f.get(1), f.get(3), f.get(5))
    assert woken == []
    one, two, three = (request.reply for request in raw.requests())
    acts: list[Callable[[], None]] = [lambda: one.start(200, []), lambda: one.send(b"x"), one.end, two.abort]
    for act in (*acts, three.refuse):
        act()
        assert woken, act
        woken.clear()


# Chunks


@given(st.lists(st.integers(1, 200), max_size=30), st.binary(min_size=1, max_size=2000))
def test_how_the_bytes_are_cut_changes_nothing(cuts: list[int], body: bytes) -> None:
    wire = f.hello() + f.post(1, body) + f.get(3) + f.rst(1) + f.headers(5) + f.data(5, body) + f.get(7)

    def seen(chunks: list[bytes]) -> list[tuple[str, Body]]:
        core, found = Http2Core(configured(), peer=""), []
        for chunk in chunks:
            for event in core.receive(chunk, 1):
                if isinstance(event, RequestReady) and event.reply.stream_id != 1:
                    found.append((event.head.path, event.body))
        return found

    edges = [0, *itertools.accumulate(cuts)]
    chunks = [wire[a:b] for a, b in itertools.pairwise(edges)] + [wire[edges[-1] :]]
    assert seen(chunks) == seen([wire]) == [("/health", b""), ("/health", b"")]


def test_data_received_by_the_client_is_what_was_sent_in_order() -> None:
    joined = Joined()
    sid = joined.request()
    reply = joined.reply(sid)
    reply.start(200, [])
    for number in range(50):
        reply.send(b"%d," % number)
        if number % 7 == 0:
            joined.pump()
    reply.end()
    joined.pump()
    assert joined.received(sid) == b"".join(b"%d," % n for n in range(50))
    assert len(joined.of(DataReceived, sid)) == 9
