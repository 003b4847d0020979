"""What frames mean, where tests/conformance does not say it: order of events, memory of heads, any conversation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from evap.protocol import headers as code
from evap.protocol.events import RequestReady, StreamCancelled, WindowOpened
from evap.protocol.stream import State, Stream
from tests.protocol import frames as f
from tests.protocol.joined import Raw


def test_requests_come_last_and_in_order() -> None:
    raw = Raw()
    raw.send(f.get(1), f.get(3))
    first = raw.requests()[0].reply
    new = raw.send(f.get(5), f.rst(1), f.get(7))
    assert [type(event) for event in new] == [StreamCancelled, RequestReady, RequestReady]
    assert new[0] == StreamCancelled(first, "client_reset")


def test_a_repeated_head_is_the_same_head_and_a_priority_update_changes_only_its_own() -> None:
    raw = Raw()
    raw.send(f.get(1), f.get(3), f.priority_update(5, b"u=0"), f.get(5), f.get(7))
    one, two, three, four = (request.head for request in raw.requests())
    assert one is two is four
    assert three.get(b"priority") == b"u=0"
    assert four.get(b"priority") is None


def test_the_same_head_with_and_without_a_body() -> None:
    """The block is the same, END_STREAM is not: content-length makes the one malformed."""
    raw = Raw()
    fields = (*f.POST, (b"content-length", b"2"))
    raw.send(f.headers(1, fields), f.data(1, b"{}", end=True), f.headers(3, fields, end=True))
    assert len(raw.requests()) == 1
    assert raw.resets(3) == [code.PROTOCOL_ERROR]


def test_an_early_answer_ends_with_no_error_unless_the_body_came_to_its_end() -> None:
    raw = Raw(max_body_bytes=10)
    raw.send(f.headers(1), f.data(1, bytes(20)))
    raw.send(f.headers(3), f.data(3, bytes(20), end=True))
    assert (raw.status(1), raw.status(3)) == (413, 413)
    assert list(raw.core.streams) == [1]
    raw.wait(0.9)
    assert raw.resets() == []  # curl 7.88 would lose the answer
    raw.wait(0.2)
    assert (raw.resets(1), raw.resets(3)) == ([code.NO_ERROR], [])
    assert raw.core.streams == {}


@pytest.mark.parametrize("end", [f.data(1, bytes(5), end=True), f.headers(1, [(b"x", b"y")], end=True)])
def test_a_client_may_end_its_request_after_an_early_answer(end: bytes) -> None:
    raw = Raw(max_body_bytes=10)
    raw.send(f.headers(1), f.data(1, bytes(11)))
    raw.send(f.data(1, bytes(2)), end)
    assert raw.core.streams == {}
    raw.wait(2)
    assert (raw.status(1), raw.resets(1)) == (413, [])
    assert (raw.requests(), raw.cancelled(), raw.shared.body_bytes) == ([], [], 0)


def test_what_comes_after_an_early_answer_is_credited_but_not_without_end() -> None:
    """httpcore sends all of its body before it reads an answer; a reset while it waits for window would hang it."""
    raw = Raw(max_body_bytes=10_000, stream_window_bytes=1 << 16, discard_bytes=160_000)
    raw.send(f.headers(1), f.data(1, bytes(10_001)))
    for sent in range(0, 160_000, 10_000):
        raw.wait(0.9)
        assert raw.resets(1) == [], sent
        raw.send(f.data(1, bytes(10_000)))
    raw.send(f.data(1, b"x"))
    assert raw.resets(1) == [code.NO_ERROR]
    assert raw.core.streams == {}
    assert raw.healthy


def test_a_client_resets_after_an_early_answer() -> None:
    raw = Raw(max_body_bytes=10)
    raw.send(f.headers(1), f.data(1, bytes(11)))
    raw.send(f.rst(1))
    assert (raw.core.streams, raw.cancelled()) == ({}, [])
    raw.wait(2)
    assert raw.resets(1) == []


def state(stream: Stream) -> State:
    return stream.state


def test_an_early_answer_that_waits_for_window_goes_on_discarding() -> None:
    raw = Raw(greet=False, max_body_bytes=10)
    raw.send(f.hello((4, 0)), f.headers(1), f.data(1, bytes(20)))
    stream = raw.core.streams[1]
    assert state(stream) is State.EARLY
    raw.send(f.data(1, bytes(1000)))
    assert (stream.chunks, raw.shared.body_bytes) == ([], 0)
    raw.send(f.data(1, b"", end=True))
    assert state(stream) is State.ANSWERING
    raw.send(f.window(1, 10_000))
    assert raw.resets() == []
    assert b"body_too_large" in raw.body(1)
    assert not [e for e in raw.events if isinstance(e, (RequestReady, WindowOpened))]


def test_late_frames_have_a_budget() -> None:
    raw = Raw()
    raw.send(f.headers(1), f.rst(1))
    for _ in range(3000):
        raw.send(f.data(1, bytes(100)))
    assert raw.goaway == code.ENHANCE_YOUR_CALM


def test_refusals_before_the_client_knows_the_limit_are_free() -> None:
    raw = Raw(greet=False, max_concurrent_streams=10, reset_burst=20)
    raw.send(f.PREFACE, f.settings(), *[f.get(sid) for sid in range(1, 401, 2)])
    assert raw.resets() == [code.REFUSED_STREAM] * 190
    assert raw.healthy
    raw.send(f.settings_ack(), *[f.get(sid) for sid in range(401, 601, 2)])
    assert raw.goaway == code.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("bad", [f.frame(f.HEADERS, f.END_HEADERS, 1, b"\x80"), f.ping() * 2000, f.data(99, b"x")])
def test_after_a_violation_everything_is_cancelled_and_nothing_is_read(bad: bytes) -> None:
    raw = Raw()
    raw.send(f.get(3), f.headers(5), f.data(5, b"half"))
    new = raw.send(f.get(7), bad, f.get(9))
    assert [event for event in new if isinstance(event, RequestReady)] == []
    assert raw.cancelled() == ["protocol_error"]
    assert raw.core.streams == {}
    assert raw.shared.body_bytes == 0
    assert raw.shared.counts["violations"] == 1
    assert raw.send(f.get(11)) == []


def test_goaway_carries_a_reason_without_the_clients_bytes() -> None:
    raw = Raw()
    raw.send(f.get(1, (b"x-secret", b"s3cr3t")), f.frame(f.PING, 0, 1, b"s3cr3t!!"))
    [bye] = [o for o in raw.out if o.type == f.GOAWAY]
    assert bye.payload[:4] == (1).to_bytes(4)
    assert bye.payload[8:] == b"frame type on the wrong kind of stream"


class Conversation(RuleBasedStateMachine):
    """Clients of any manners. The core and h2 never disagree about which streams are open, events pair up, and memory
    that is counted is there."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = Raw(max_concurrent_streams=6, max_body_bytes=5000)
        self.next_id = 1

    def _some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([*self.raw.core.streams, max(1, self.next_id - 2), self.next_id]))

    @rule(end=st.booleans(), skip=st.sampled_from([0, 0, 4]), length=st.sampled_from([None, 0, 10, 6000]))
    def open(self, end: bool, skip: int, length: int | None) -> None:
        self.next_id += skip
        more = [] if length is None else [(b"content-length", b"%d" % length)]
        self.raw.send(f.headers(self.next_id, [*f.POST, *more], end=end))
        self.next_id += 2

    @rule(data=st.data(), size=st.sampled_from([0, 1, 10, 3000]), end=st.booleans())
    def send_body(self, data: st.DataObject, size: int, end: bool) -> None:
        self.raw.send(f.data(self._some(data), bytes(size), end=end))

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        self.raw.send(f.rst(self._some(data)))

    @rule(data=st.data(), increment=st.sampled_from([1, 70_000, 1 << 30]))
    def window(self, data: st.DataObject, increment: int) -> None:
        self.raw.send(f.window(data.draw(st.sampled_from([0, self._some(data)])), increment))

    @rule(size=st.sampled_from([0, 100, 60_000]))
    def initial_window(self, size: int) -> None:
        self.raw.send(f.settings((4, size)))

    @rule(data=st.data(), what=st.sampled_from(["start", "send", "end", "whole", "abort", "refuse"]))
    def answer(self, data: st.DataObject, what: str) -> None:
        requests = self.raw.requests()
        if requests:
            reply = data.draw(st.sampled_from(requests)).reply
            arguments: dict[str, tuple[Any, ...]] = {
                "start": (200, []),
                "send": (bytes(40_000),),
                "whole": (200, [], bytes(9)),
            }
            getattr(reply, what)(*arguments.get(what, ()))
            self.raw.flush()

    @rule(seconds=st.sampled_from([0.1, 20.0]))
    def pause(self, seconds: float) -> None:
        self.raw.wait(seconds)

    @invariant()
    def h2_agrees(self) -> None:
        core = self.raw.core
        if not core.closing:
            assert {sid for sid, stream in core.conn.streams.items() if stream.open} == set(core.streams)
            assert len(core.streams) <= 6

    @invariant()
    def books_balance(self) -> None:
        streams = self.raw.core.streams.values()
        assert self.raw.shared.body_bytes == sum(len(chunk) for s in streams for chunk in s.chunks)
        for stream in streams:
            assert stream.buffered == sum(map(len, stream.queue))

    @invariant()
    def events_pair_up(self) -> None:
        ready = [event.reply for event in self.raw.requests()]
        gone = [event.reply for event in self.raw.events if isinstance(event, StreamCancelled)]
        assert len(set(map(id, ready))) == len(ready)
        assert len(set(map(id, gone))) == len(gone)
        assert {id(reply) for reply in gone} <= {id(reply) for reply in ready}
        assert not any(reply.alive for reply in gone)
        open_ids = {id(stream) for stream in self.raw.core.streams.values()}
        assert all(id(reply) in open_ids for reply in ready if reply.alive)


Conversation.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestConversation = Conversation.TestCase
