"""The HTTP/1.1 core without a socket: bytes and clock readings in, events and bytes out. h11 is the client's eye."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.config import ProtocolConfig
from evap.protocol.events import Event, PeerGone, RequestReady, StreamCancelled, WindowOpened
from evap.protocol.http1 import TRANSITIONS, Http1Core, Input, Phase
from evap.protocol.http1_reply import Http1Reply, chunk
from evap.protocol.limits import NS, Shared

CONFIG = ProtocolConfig()
GET = b"GET /health HTTP/1.1\r\nHost: evap.test\r\n\r\n"
JSON = ((b"content-type", b"application/json"),)
SSE = ((b"content-type", b"text/event-stream"),)


def post(body: bytes, *fields: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST /v1/completions HTTP/" + version, b"Host: evap.test", b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Wire:
    """A core with a transport that takes everything (`room` bytes, if set) and a clock that moves when told to."""

    def __init__(self, **options: Any) -> None:
        self.shared = Shared()
        self.now = 10**18
        self.core = Http1Core(replace(CONFIG, **options), peer="127.0.0.1:1", shared=self.shared, now_ns=self.now)
        self.sent = b""
        self.held = 0
        self.events: list[Event] = []

    def receive(self, data: bytes) -> list[Event]:
        return self._note(self.core.receive(data, self.now))

    def request(self, data: bytes = GET) -> Http1Reply:
        self.receive(data)
        return self.reply()

    def reply(self) -> Http1Reply:
        """Of the newest request."""
        reply = [e for e in self.events if isinstance(e, RequestReady)][-1].reply
        assert isinstance(reply, Http1Reply)
        return reply

    def flush(self, room: int | None = None) -> bytes:
        """Write; the peer takes `room` bytes of all that is outstanding, or everything."""
        data = b"".join(bytes(part) for part in self.core.take_output())
        self.sent += data
        outstanding = self.held + len(data)
        self.held = outstanding - (outstanding if room is None else min(room, outstanding))
        self._note(self.core.written(self.held, self.now))
        return data

    def pass_s(self, seconds: float) -> list[Event]:
        self.now += int(seconds * NS)
        return self._note(self.core.tick(self.now))

    def eof(self) -> list[Event]:
        return self._note(self.core.eof(self.now))

    def _note(self, events: list[Event]) -> list[Event]:
        self.events += events
        return events

    @property
    def cancelled(self) -> list[str]:
        return [e.reason for e in self.events if isinstance(e, StreamCancelled)]

    @property
    def requests(self) -> list[RequestReady]:
        return [e for e in self.events if isinstance(e, RequestReady)]


def read(data: bytes, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """One response as h11 understands it; it must be the only thing in `data`."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    status, headers, body = 0, {}, b""
    while True:
        event = client.next_event()
        if isinstance(event, h11.Response):
            status, headers = event.status_code, {n.decode(): v.decode() for n, v in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert client.trailing_data[0] == b""
            return status, headers, body
        elif event is h11.NEED_DATA:
            client.receive_data(b"")  # only the end of the connection ends such a body


def status_of(wire: Wire) -> tuple[int, str]:
    wire.flush()
    status, _, body = read(wire.sent)
    return status, json.loads(body)["error"]["code"]


# Requests and whole answers


def test_a_request_in_single_bytes() -> None:
    wire = Wire()
    for i, byte in enumerate(post(b"hello")):
        assert not wire.requests, i
        wire.receive(bytes([byte]))
    (ready,) = wire.requests
    assert (ready.head.method, ready.head.path, ready.head.version, ready.body) == (
        "POST", "/v1/completions", "1.1", b"hello",
    )  # fmt: skip
    assert (ready.head.scheme, ready.head.authority, ready.head.peer) == ("http", "evap.test", "127.0.0.1:1")


def test_a_whole_answer_and_the_next_request() -> None:
    wire = Wire()
    for body in (b"{}", b"", b"x" * 100_000):
        reply = wire.request()
        reply.whole(200, JSON, body)
        status, headers, got = read(wire.flush())
        assert (status, got, headers["content-length"], headers["server"]) == (200, body, str(len(body)), "evap")
        assert headers["date"].endswith("GMT")
        assert "connection" not in headers
        assert not reply.alive
        assert wire.core.open_replies == 0
        assert not wire.core.closing
    assert wire.shared.requests == 3


def test_a_streamed_answer_is_chunked() -> None:
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    reply.send(b"data: 1\n\n")
    reply.send(b"")  # an empty chunk would end the body
    reply.send(b"data: 2\n\n")
    reply.end([(b"x-end", b"yes")])
    data = wire.flush()
    assert data.endswith(b"0\r\nx-end: yes\r\n\r\n")
    status, headers, body = read(data)
    assert (status, body) == (200, b"data: 1\n\ndata: 2\n\n")
    assert headers["transfer-encoding"] == "chunked"
    assert "content-length" not in headers


def test_head_gets_the_head_of_either_form() -> None:
    wire = Wire()
    request = GET.replace(b"GET", b"HEAD")
    wire.request(request).whole(200, JSON, b"12345")
    status, headers, body = read(wire.flush(), "HEAD")
    assert (status, headers["content-length"], body) == (200, "5", b"")
    reply = wire.request(request)
    assert wire.core.stream_window(0) == 0
    reply.start(200, SSE)
    reply.send(b"never")
    assert wire.core.stream_window(0) == 0
    reply.end()
    assert read(wire.flush(), "HEAD")[2] == b""


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body(status: int) -> None:
    wire = Wire()
    wire.request().whole(status, (), b"")
    assert b"content-length" not in wire.flush()
    reply = wire.request()
    reply.start(status, ())
    reply.end()
    data = wire.flush()
    assert b"transfer-encoding" not in data
    assert data.endswith(b"\r\n\r\n")
    assert data.count(b"\r\n\r\n") == 1


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


def test_connection_close_and_http_1_0() -> None:
    for request in (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"GET / HTTP/1.0\r\n\r\n"):
        wire = Wire()
        wire.request(request + GET).whole(200, JSON, b"{}")
        assert read(wire.flush())[1]["connection"] == "close"
        assert wire.core.closing
        assert len(wire.requests) == 1
    wire = Wire()
    wire.request(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").whole(200, JSON, b"{}")
    assert read(wire.flush())[1]["connection"] == "keep-alive"
    assert not wire.core.closing


def test_http_1_0_streams_until_the_connection_closes() -> None:
    wire = Wire()
    reply = wire.request(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    reply.start(200, SSE)
    reply.send(b"data: 1\n\n")
    assert wire.core.acquire(reply) is None or wire.core.stream_window(0) == 0  # rows are chunks
    reply.end()
    data = wire.flush()
    head, _, body = data.partition(b"\r\n\r\n")
    assert body == b"data: 1\n\n"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert wire.core.closing


def test_upgrade_h2c_is_ignored_and_keeps_its_body() -> None:
    wire = Wire()
    fields = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA")
    reply = wire.request(post(b'{"a":1}', *fields))
    assert wire.requests[0].body == b'{"a":1}'
    reply.whole(200, JSON, b"{}")
    assert read(wire.flush())[0] == 200
    assert not wire.core.closing


def test_a_chunked_request_body() -> None:
    wire = Wire()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire.receive(head + b"5\r\nhello\r\n1")
    assert wire.shared.body_bytes == 5
    wire.receive(b"\r\n!\r\n0\r\nT: x\r\n\r\n" + GET)
    assert wire.requests[0].body == b"hello!"
    assert wire.shared.body_bytes == 0


def test_a_stray_crlf_between_requests_is_skipped() -> None:
    wire = Wire()
    wire.receive(b"\r")
    wire.receive(b"\n" + GET)
    assert len(wire.requests) == 1


def test_a_body_may_hold_what_a_head_may_not() -> None:
    body = b'{\n  "a": 1,\n\r\0}\n' + b"x" * 50_000
    wire = Wire()
    wire.receive(post(body))
    assert wire.requests[0].body == body
    wire = Wire()
    wire.receive(GET + post(body))
    wire.reply().whole(200, JSON, b"{}")
    wire.flush()
    assert wire.requests[1].body == body


# Expect


def test_100_comes_when_the_body_is_wanted_and_has_not_begun() -> None:
    wire = Wire()
    request = post(b"abc", b"Expect: 100-continue")
    wire.receive(request[:-3])
    assert wire.flush() == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert wire.flush() == b""
    wire.receive(request[-3:])
    assert wire.flush() == b""
    assert wire.requests[0].body == b"abc"
    wire = Wire()
    wire.receive(request)
    assert wire.flush() == b""
    assert wire.requests


def test_no_100_for_what_is_refused() -> None:
    wire = Wire(max_body_bytes=2)
    wire.receive(post(b"abc", b"Expect: 100-continue")[:-3])
    assert status_of(wire) == (413, "body_too_large")
    wire = Wire()
    wire.receive(post(b"abc", b"Expect: the-moon"))
    assert status_of(wire) == (417, "expectation_failed")


# Refusals


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\n\n", b"\x16\x03\x01\x02", b"GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
def test_malformed_requests_get_400_and_the_end(data: bytes) -> None:
    wire = Wire()
    assert wire.receive(data + GET) == []
    assert status_of(wire) == (400, "bad_request")
    assert wire.receive(GET) == []
    assert wire.shared.violations == 1
    assert wire.core.closing
    assert not wire.core.aborting


def test_header_limits_answer_431() -> None:
    for data in (GET[:-2] + b"A: b\r\n" * 101 + b"\r\n", b"GET /" + b"x" * 9000, GET[:-2] + b"A: " + b"x" * 40_000):
        wire = Wire()
        wire.receive(data)
        assert status_of(wire) == (431, "headers_too_large")


def test_body_limits_answer_413_early_and_when_counting() -> None:
    wire = Wire(max_body_bytes=10)
    wire.receive(post(b"x" * 11)[:-11])
    assert status_of(wire) == (413, "body_too_large")
    assert wire.core.closing
    wire.receive(b"x" * 11)  # the body that was on its way
    assert wire.shared.body_bytes == 0
    assert wire.eof() == [PeerGone()]
    assert wire.core.closing
    wire = Wire(max_body_bytes=10)
    wire.receive(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n12345678\r\n3\r\n")
    assert status_of(wire) == (413, "body_too_large")
    assert wire.shared.body_bytes == 0


def test_all_bodies_together_are_bounded() -> None:
    wire = Wire(max_buffered_body_bytes=1 << 20)
    wire.shared.body_bytes = (1 << 20) - 4
    wire.receive(post(b"12345678")[:-3])
    assert status_of(wire) == (503, "overloaded")
    assert wire.shared.body_bytes == (1 << 20) - 4


def test_an_error_answer_is_never_longer_than_its_peer_deserves() -> None:
    wire = Wire()
    wire.receive(b"GET / HTTP/1.1\r\nHost: " + b"@" * 8000 + b"\r\n\r\n")
    assert len(wire.flush()) < 1024


# Time


def test_deadlines() -> None:
    wire = Wire()
    assert wire.core.deadline_ns == wire.now + CONFIG.preface_timeout_s * NS
    wire.pass_s(CONFIG.preface_timeout_s - 0.1)
    assert not wire.core.closing
    wire.pass_s(0.1)
    assert wire.core.closing  # no first request: closed without a word
    assert wire.flush() == b""

    wire = Wire()
    wire.receive(GET[:10])
    wire.pass_s(CONFIG.header_timeout_s - 1)
    wire.receive(GET[10:20])  # more of the head does not move its deadline
    wire.pass_s(1)
    assert status_of(wire) == (408, "request_timeout")

    wire = Wire()
    wire.receive(post(b"abc")[:-3])
    for _ in range(2):  # each byte of the body moves its deadline
        wire.pass_s(CONFIG.body_timeout_s - 1)
        wire.receive(b"a")
    wire.pass_s(CONFIG.body_timeout_s - 1)
    assert wire.flush() == b""
    wire.pass_s(1)
    assert status_of(wire) == (408, "request_timeout")


def test_idle_connections_close_and_running_ones_do_not() -> None:
    wire = Wire()
    reply = wire.request()
    wire.pass_s(CONFIG.idle_timeout_s * 10)
    assert reply.alive
    reply.whole(200, JSON, b"{}")
    wire.flush()
    wire.pass_s(CONFIG.idle_timeout_s - 1)
    assert not wire.core.closing
    wire.pass_s(1)
    assert wire.core.closing
    assert wire.flush() == b""


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
    assert reply.buffered == 0


def test_eof_inside_a_request_gives_its_bytes_back() -> None:
    wire = Wire()
    wire.receive(post(b"abc")[:-1])
    assert wire.shared.body_bytes == 2
    assert wire.eof() == [PeerGone()]
    assert wire.shared.body_bytes == 0


def test_abort_breaks_off_so_that_it_shows() -> None:
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    reply.send(b"data: 1\n\n")
    reply.abort()
    data = wire.flush()
    with pytest.raises(h11.RemoteProtocolError):
        read(data)
    assert wire.core.closing
    assert not wire.core.aborting
    assert wire.eof() == [PeerGone()]  # its owner ended it: no cancel
    wire = Wire()
    reply = wire.request(b"GET / HTTP/1.0\r\n\r\n")
    reply.start(200, SSE)
    reply.send(b"data: 1\n\n")
    reply.abort()
    assert wire.core.aborting  # a plain close would look like the end of the body


def test_stop_cancels_what_still_runs() -> None:
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    assert wire.core.stop(wire.now) == [StreamCancelled(reply, "drain")]
    assert wire.core.closing
    assert wire.eof() == [PeerGone()]


def test_refuse() -> None:
    wire = Wire()
    wire.request().refuse()
    data = wire.flush()
    status, headers, _ = read(data)
    assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
    assert wire.core.closing
    wire = Wire()
    reply = wire.request()
    reply.start(200, SSE)
    reply.refuse()
    wire.flush()
    assert wire.core.closing


def test_our_own_bad_header_is_never_sent() -> None:
    wire = Wire()
    reply = wire.request()
    for name, value in ((b"a", b"b\r\nc: d"), (b"A", b"b"), (b"a b", b"c"), (b"transfer-encoding", b"chunked")):
        with pytest.raises(ValueError, match="header"):
            reply.whole(200, [(name, value)], b"{}")
    reply.whole(200, JSON, b"{}")
    assert read(wire.flush())[0] == 200


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
    wire.core.append_raw(memoryview(row), 2)
    wire.core.spend_connection(len(row))
    wire.core.spend(reply.stream_id, len(row))
    reply.send(b"last")
    reply.end()
    assert rows.released.count(reply) >= 2
    assert read(wire.flush())[2] == b"firstrow 1row 2last"
    assert wire.core.acquire(reply) is None
    assert wire.core.connection_window == 0


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
                wire.core.append_raw(chunk(b"row"), 1)


def _check(wire: Wire) -> None:
    cancelled = [e.reply for e in wire.events if isinstance(e, StreamCancelled)]
    assert len(cancelled) == len({id(r) for r in cancelled})
    assert not any(r.alive for r in cancelled)
    alive = [r for r in wire.requests if r.reply.alive]
    assert len(alive) <= 1
    assert wire.core.open_replies == len(alive)
    assert wire.core.closing or wire.core.phase is not Phase.GONE
