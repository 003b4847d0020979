"""The seam between the HTTP/2 core and row buffers: whoever writes, both ends agree on every window."""

from __future__ import annotations

import itertools
from typing import Any

from h2.events import StreamEnded
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.protocol.connection import Http2Core
from evap.protocol.events import Reply, RowCore
from tests.protocol import frames as f
from tests.protocol.joined import Joined, Raw


class Host:
    """A RowsHost as simple as it can be: a dict of windows."""

    def __init__(self, core: Http2Core) -> None:
        self.core = core
        core.rows = self
        self.window: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []

    def join(self, reply: Reply) -> bool:
        window = self.core.acquire(reply)
        if window is None:
            return False
        self.window[reply.stream_id] = window
        return True

    def push(self, sid: int, payload: bytes) -> bool:
        if self.window[sid] < len(payload):
            return False
        if not self.core.take_rows(f.data(sid, payload), 1, len(payload)):
            return False
        self.window[sid] -= len(payload)
        return True

    def _write_back(self, sid: int) -> None:
        self.core.spend(sid, self.core.stream_window(sid) - self.window[sid])

    def before_window_frame(self, core: RowCore, stream_id: int) -> None:
        self.calls.append(("before", stream_id))
        for sid in [stream_id] if stream_id else self.window:
            self._write_back(sid)

    def after_window_frame(self, core: RowCore, stream_id: int) -> None:
        self.calls.append(("after", stream_id))
        for sid in [stream_id] if stream_id else self.window:
            self.window[sid] = core.stream_window(sid)

    def release(self, reply: Reply) -> None:
        sid = reply.stream_id
        if sid in self.window:
            self.calls.append(("release", sid))
            self._write_back(sid)
            del self.window[sid]
            self.core.on_rows(sid, False)


def test_who_may_go_on_rows() -> None:
    joined = Joined()
    host = Host(joined.core)
    one, head, two = joined.request(), joined.request(None, [(b":method", b"HEAD"), *f.GET[1:]]), joined.request()
    reply = joined.reply(one)
    assert not host.join(reply)  # not started
    reply.start(200, [])
    joined.reply(head).start(200, [])
    assert not host.join(joined.reply(head))
    assert host.join(reply)
    blocked = joined.reply(two)
    blocked.start(200, [])
    blocked.send(bytes(70_000))
    joined.pump()
    assert not host.join(blocked)  # something is buffered
    blocked.abort()
    assert not host.join(blocked)


def test_rows_and_the_outbox_keep_their_order_and_their_books() -> None:
    joined = Joined()
    host = Host(joined.core)
    sid = joined.request()
    reply = joined.reply(sid)
    reply.start(200, [])
    assert host.join(reply)
    assert host.push(sid, b"row one,")
    reply.send(b"slow path,")
    assert ("release", sid) in host.calls
    joined.pump()
    assert host.join(reply)
    assert host.push(sid, b"row two,")
    reply.end()
    joined.pump()
    assert joined.received(sid) == b"row one,slow path,row two,"
    assert joined.of(StreamEnded, sid)
    assert joined.core.connection_window == joined.client.inbound_flow_control_window


def test_a_reset_takes_the_stream_off_rows() -> None:
    joined = Joined()
    host = Host(joined.core)
    sid = joined.request()
    joined.reply(sid).start(200, [])
    host.join(joined.reply(sid))
    host.push(sid, b"row")
    joined.pump()
    joined.client.reset_stream(sid, 8)
    joined.pump()
    assert host.window == {}
    assert joined.core.stream_window(sid) == 0
    joined.core.spend(sid, 5)  # late, and ignored
    assert joined.core.connection_window == joined.client.inbound_flow_control_window


ROWS = st.lists(
    st.one_of(
        st.tuples(st.just("row"), st.integers(0, 2), st.integers(1, 3000)),
        st.tuples(st.just("send"), st.integers(0, 2), st.integers(1, 3000)),
        st.tuples(st.just("join"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("window"), st.integers(0, 2), st.integers(1, 9000)),
        st.tuples(st.just("connection"), st.just(0), st.integers(1, 9000)),
        st.tuples(st.just("initial"), st.just(0), st.integers(0, 20_000)),
    ),
    max_size=50,
)


@given(ROWS)
@settings(max_examples=60)
def test_windows_stay_true_whoever_sends(script: list[tuple[str, int, int]]) -> None:
    joined = Joined(client={4: 10_000})
    host = Host(joined.core)
    sids = [joined.request() for _ in range(3)]
    replies = [joined.reply(sid) for sid in sids]
    sent = dict.fromkeys(sids, b"")
    for reply in replies:
        reply.start(200, [])
    for (what, index, size), octet in zip(script, itertools.cycle(range(256)), strict=False):
        sid, reply, payload = sids[index], replies[index], bytes((octet,)) * size
        if what == "join" and sid not in host.window:
            host.join(reply)
        elif what == "row" and sid in host.window and host.push(sid, payload):
            sent[sid] += payload
        elif what == "send":
            reply.send(payload)
            sent[sid] += payload
        elif what == "window":
            joined.client.increment_flow_control_window(size, sid)
        elif what == "connection":
            joined.client.increment_flow_control_window(size)
        elif what == "initial":
            joined.client.update_settings({4: size})
        joined.pump()
        check(joined, host, dict(zip(sids, replies, strict=True)), sent)


def check(joined: Joined, host: Host, replies: dict[int, Any], sent: dict[int, bytes]) -> None:
    assert joined.core.connection_window == joined.client.inbound_flow_control_window
    for sid, reply in replies.items():
        assert joined.received(sid) + bytes(reply.buffered) == sent[sid][: -reply.buffered or None] + bytes(
            reply.buffered
        )
        ours = host.window[sid] if sid in host.window else joined.core.stream_window(sid)
        assert ours == joined.client.streams[sid].inbound_flow_control_window


def test_rows_wait_while_the_transport_is_full() -> None:
    raw = Raw()
    host = Host(raw.core)
    raw.send(f.get(1))
    reply = raw.requests()[0].reply
    reply.start(200, [])
    host.join(reply)
    raw.core.written(256 << 10, raw.now_ns)
    assert not raw.core.writable
    assert not host.push(1, b"row")
    raw.core.written(0, raw.now_ns)
    assert host.push(1, b"row")
    assert raw.core.take_rows(b"", 0, 1 << 20) is False  # more than the connection's window
    raw.send(f.frame(f.PING, 0, 1, bytes(8)))
    assert raw.goaway is not None
    assert not raw.core.writable  # nothing follows a GOAWAY that ends the connection
