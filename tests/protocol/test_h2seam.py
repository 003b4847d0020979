"""Every seam against stock h2: the same octets, and the same states, windows and settings afterwards."""

from __future__ import annotations

from typing import Any

import h2
import pytest
from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.stream import H2Stream
from hpack import Decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.protocol import hpack_out
from evap.protocol.gate import Violation
from evap.protocol.h2seam import ServerConnection
from tests.protocol import frames as f
from tests.protocol.joined import configured

CONFIG = configured(stream_window_bytes=65_535, connection_window_bytes=65_535)


def state_of(stream: H2Stream) -> dict[str, Any]:
    machine = stream.state_machine
    return {
        "state": machine.state,
        "closed_by": machine.stream_closed_by,
        "headers": (machine.headers_sent, machine.headers_received, machine.trailers_sent, machine.trailers_received),
        "client": machine.client,
        "out": stream.outbound_flow_control_window,
        "in": stream.inbound_flow_control_window,
        "frame": stream.max_outbound_frame_size,
    }


def states(conn: H2Connection) -> dict[str, Any]:
    return {
        "state": conn.state_machine.state,
        "out": conn.outbound_flow_control_window,
        "in": conn.inbound_flow_control_window,
        "highest": conn.highest_inbound_stream_id,
        "streams": {sid: state_of(stream) for sid, stream in conn.streams.items()},
    }


class Twins:
    """Stock h2 and ours, fed the same."""

    def __init__(self) -> None:
        self.stock = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.stock.initiate_connection()
        self.ours = ServerConnection(CONFIG)
        self.stock.receive_data(f.PREFACE + f.settings())
        self.ours.feed(f.settings())
        self.take()

    def take(self) -> tuple[bytes, bytes]:
        return self.stock.data_to_send(), self.ours.data_to_send()

    def same(self) -> None:
        _ = self.stock.open_inbound_streams  # h2 purges closed streams now and then, and so do we at other times
        self.ours.purge()
        assert states(self.stock) == states(self.ours)

    def request(self, sid: int, *, end: bool) -> H2Stream:
        self.stock.receive_data(f.headers(sid, f.POST, end=end))
        assert self.ours.decode(f.block(f.POST)) == [tuple(field) for field in f.POST]
        return self.ours.open_request(sid, ended=end)

    def body(self, stream: H2Stream, payload: bytes, *, end: bool) -> None:
        self.stock.receive_data(f.data(stream.stream_id, payload, end=end))
        if payload:
            self.stock.acknowledge_received_data(len(payload), stream.stream_id)
        self.ours.body(stream, len(payload), ended=end)


def test_h2_is_the_version_that_the_seams_were_made_for() -> None:
    assert h2.__version__.startswith("4.4.")


@pytest.mark.parametrize("end", [True, False])
def test_a_new_request(end: bool) -> None:
    twins = Twins()
    for sid in (1, 3, 9):
        twins.request(sid, end=end)
        twins.same()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.booleans()),
        st.tuples(st.just("body"), st.integers(0, 9000)),
        st.tuples(st.just("end"), st.integers(0, 100)),
        st.tuples(st.just("trailers"), st.none()),
        st.tuples(st.just("head"), st.booleans()),
        st.tuples(st.just("data"), st.integers(0, 5000)),
        st.tuples(st.just("finish"), st.integers(0, 100)),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("window"), st.integers(1, 70_000)),
    ),
    max_size=60,
)


class Conversation:
    """One method per step; a step that has no stream to work on does nothing."""

    def __init__(self, random: Any) -> None:
        self.twins = Twins()
        self.random = random
        self.receiving: list[H2Stream] = []
        self.answering: list[H2Stream] = []
        self.started: set[int] = set()
        self.next_id = 1

    def pick(self, streams: list[H2Stream]) -> list[H2Stream]:
        return [self.random.choice(streams)] if streams else []

    def open(self, end: bool) -> None:
        stream = self.twins.request(self.next_id, end=end)
        self.next_id += self.random.choice([2, 2, 6])
        self.answering.append(stream)
        if not end:
            self.receiving.append(stream)

    def body(self, size: int) -> None:
        for stream in self.pick(self.receiving):
            self.twins.body(stream, bytes(size), end=False)

    def end(self, size: int) -> None:
        for stream in self.pick(self.receiving):
            self.twins.body(stream, bytes(size), end=True)
            self.receiving.remove(stream)

    def trailers(self, _: None) -> None:
        for stream in self.pick(self.receiving):
            fields = ((b"x", b"y"),)
            self.twins.stock.receive_data(f.headers(stream.stream_id, fields, end=True))
            self.twins.ours.decode(f.block(fields))
            self.twins.ours.trailers(stream)
            self.receiving.remove(stream)

    def window(self, increment: int) -> None:
        for frame in [f.window(0, increment), *[f.window(s.stream_id, increment) for s in self.pick(self.answering)]]:
            self.twins.stock.receive_data(frame)
            self.twins.ours.feed(frame)

    def reset(self, _: None) -> None:
        for stream in self.pick(self.answering):
            self.twins.stock.reset_stream(stream.stream_id, 8)
            self.twins.ours.reset(stream, 8)
            self.answering.remove(stream)
            self.receiving = [other for other in self.receiving if other is not stream]

    def head(self, end: bool) -> None:
        for stream in self.pick([s for s in self.answering if s.stream_id not in self.started]):
            self.started.add(stream.stream_id)
            fields = [(b":status", b"200"), (b"x-kept", b"1")]
            self.twins.stock.send_headers(stream.stream_id, fields, end_stream=end)
            frame = self.twins.ours.head(stream, hpack_out.status(200) + hpack_out.block(fields[1:]), end=end)
            assert frame[3:9] == self.twins.stock.data_to_send()[3:9]  # type, flags, id; the blocks are ours
            if end:
                self.answering.remove(stream)

    def data(self, size: int, *, end: bool = False) -> None:
        for stream in self.pick([s for s in self.answering if s.stream_id in self.started]):
            size = min(size, self.twins.stock.local_flow_control_window(stream.stream_id))
            payload = bytes(size)
            self.twins.stock.send_data(stream.stream_id, memoryview(payload), end_stream=end)
            assert self.twins.ours.data_header(stream, size, end=end) + payload == self.twins.stock.data_to_send()
            if end:
                self.answering.remove(stream)

    def finish(self, size: int) -> None:
        self.data(size, end=True)


@given(STEPS, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_conversation_leaves_both_in_the_same_state(steps: list[tuple[str, Any]], random: Any) -> None:
    """Each step goes to stock h2 by its public calls and to ours by the seams."""
    conversation = Conversation(random)
    for what, value in steps:
        getattr(conversation, what)(value)
        conversation.twins.same()
        stock, ours = conversation.twins.take()
        assert stock == ours


def test_2000_data_frames_of_every_size() -> None:
    twins = Twins()
    stream = twins.request(1, end=True)
    twins.stock.send_headers(1, [(b":status", b"200")])
    twins.ours.head(stream, hpack_out.status(200), end=False)
    twins.take()
    for size in range(2000):
        for frame in (f.window(0, size + 1), f.window(1, size + 1)):
            twins.stock.receive_data(frame)
            twins.ours.feed(frame)
        payload = bytes((size & 0xFF,)) * size
        twins.stock.send_data(1, payload)
        assert twins.ours.data_header(stream, size, end=False) + payload == twins.stock.data_to_send()
    twins.same()


def test_interim_heads_and_trailers() -> None:
    twins = Twins()
    stream = twins.request(1, end=True)
    twins.stock.send_headers(1, [(b":status", b"100")])
    frames = [twins.ours.head(stream, hpack_out.status(100), end=False, informational=True)]
    twins.stock.send_headers(1, [(b":status", b"200")])
    frames.append(twins.ours.head(stream, hpack_out.status(200), end=False))
    twins.same()
    twins.stock.send_headers(1, [(b"x-t", b"1")], end_stream=True)
    frames.append(twins.ours.head(stream, hpack_out.block([(b"x-t", b"1")]), end=True))
    twins.same()
    first = [tuple(next(iter(Decoder().decode(frame[9:], raw=True)))) for frame in frames]
    assert first == [(b":status", b"100"), (b":status", b"200"), (b"x-t", b"1")]


def test_a_long_head_goes_out_in_continuations() -> None:
    ours = ServerConnection(CONFIG)
    ours.feed(f.settings())
    stream = ours.open_request(1, ended=True)
    block = hpack_out.status(200) + hpack_out.block([(b"x-%d" % i, b"v" * 5000) for i in range(10)])
    client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    client.initiate_connection()
    client.send_headers(1, f.GET, end_stream=True)
    events = client.receive_data(ours.data_to_send() + ours.head(stream, block, end=True))
    assert sum(len(event.headers or []) for event in events if hasattr(event, "headers")) == 11


@pytest.mark.parametrize("end", [True, False])
def test_promises_and_their_answers(end: bool) -> None:
    twins = Twins()
    parent = twins.request(1, end=end)
    fields = [(b":method", b"GET"), *f.POST[1:3], (b":path", b"/p")]
    for sid in (2, 4):
        twins.stock.push_stream(1, sid, fields)
        block = hpack_out.promised(b"http", b"node:8000", b"/p")
        promised, mine = twins.ours.promise(parent, block)
        theirs, _ = twins.take()
        assert promised.stream_id == sid
        assert mine[3:9] == theirs[3:9], "type, flags and stream"
        assert mine[9:13] == theirs[9:13] == sid.to_bytes(4)
        assert Decoder().decode(mine[13:], raw=True) == fields
        twins.same()
        twins.stock.send_headers(sid, [(b":status", b"200")])
        twins.stock.send_data(sid, b"12345", end_stream=True)
        theirs, _ = twins.take()
        mine = twins.ours.head(promised, hpack_out.status(200), end=False)
        mine += twins.ours.data_header(promised, 5, end=True) + b"12345"
        assert mine[:3] + mine[4:] == theirs[:3] + theirs[4:]
        twins.same()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_promise_that_the_client_resets(when: str) -> None:
    twins = Twins()
    parent = twins.request(1, end=True)
    twins.stock.push_stream(1, 2, [(b":method", b"GET"), *f.POST[1:3], (b":path", b"/p")])
    promised, _ = twins.ours.promise(parent, hpack_out.promised(b"http", b"node:8000", b"/p"))
    if when == "after":
        twins.stock.send_headers(2, [(b":status", b"200")])
        twins.ours.head(promised, hpack_out.status(200), end=False)
    twins.stock.receive_data(f.rst(2))
    twins.ours.feed(f.rst(2))
    assert promised.closed
    twins.same()


def test_goaway_changes_no_state() -> None:
    for before in (False, True):
        ours = ServerConnection(CONFIG)
        ours.feed(f.settings())
        if before:
            ours.open_request(1, ended=True)
        state = ours.state_machine.state
        ours.data_to_send()
        ours.ping(b"8 octets")
        ours.feed(f.goaway())
        ours.goaway(0, "")
        assert ours.state_machine.state is state is not ConnectionState.CLOSED
        assert f.PING in {out[3] for out in (ours.data_to_send(),)}  # what was queued is still owed


def test_a_violation_replaces_h2s_own_goaway() -> None:
    ours = ServerConnection(CONFIG)
    ours.feed(f.settings())
    ours.data_to_send()
    with pytest.raises(Violation) as caught:
        ours.feed(f.settings((2, 5)))
    assert caught.value.code == 1
    assert ours.data_to_send() == b""
    ours.goaway(caught.value.code, "reason")
    assert ours.data_to_send()[17:] == b"reason"


def test_memory_of_closed_streams_is_bounded() -> None:
    ours = ServerConnection(CONFIG)
    ours.feed(f.settings())
    for sid in range(1, 20_001, 2):
        stream = ours.open_request(sid, ended=True)
        ours.head(stream, hpack_out.status(200), end=True)
        ours.closed_one()
        ours.data_to_send()
    assert len(ours.streams) <= 64
    assert len(ours._closed_streams) <= 512


def test_idle_ids() -> None:
    ours = ServerConnection(CONFIG)
    ours.open_request(5, ended=True)
    assert [ours.is_idle(sid) for sid in (1, 3, 5, 7, 2)] == [False, False, False, True, True]
