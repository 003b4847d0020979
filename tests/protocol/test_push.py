"""Promises: the table under any order of events, and what the core does around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hpack import Decoder
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evap.protocol import headers as code
from evap.protocol import push
from evap.protocol.events import Reply, StreamCancelled
from evap.protocol.push import MAX_REFUSED, PushTable
from evap.protocol.rows import RowTable
from tests.protocol import frames as f
from tests.protocol.joined import Raw

PATH = b"/v1/chat/completions/id/blocks/0"


class Kept:
    """An events.Keep."""

    def __init__(self) -> None:
        self.body = b""
        self.closed: bool | None = None

    def add(self, data: bytes) -> None:
        assert self.closed is None, "nothing is kept after the end"
        assert data
        self.body += data

    def close(self, complete: bool) -> None:
        assert self.closed is None, "closed once"
        self.closed = complete


def started(raw: Raw, *sids: int) -> list[Reply]:
    """Requests on these streams, each with its head sent."""
    raw.send(*[f.get(sid) for sid in sids])
    replies = [request.reply for request in raw.requests()[-len(sids) :]]
    for reply in replies:
        reply.start(200, [])
    raw.flush()
    return replies


def pushed(reply: Reply, keep: Kept | None = None) -> Any:
    """A push beside `reply`, with its head sent."""
    made = reply.push(PATH, keep)
    assert made is not None
    made.start(200, [])
    return made


def promises(raw: Raw) -> list[tuple[int, int]]:
    """(parent, promised)"""
    return [(o.sid, o.number) for o in raw.out if o.type == f.PUSH_PROMISE]


class Promises(RuleBasedStateMachine):
    """PushTable against sets, under any order of promises, resets and ends."""

    LIMIT = 4

    def __init__(self) -> None:
        super().__init__()
        self.table = PushTable(self.LIMIT)
        self.parents: dict[int, int] = {}  # open parent -> refusals
        self.promised: set[int] = set()  # parents that have ever promised
        self.open: dict[int, int] = {}
        self.next_parent, self.next_push = 1, 2

    @rule()
    def request(self) -> None:
        self.parents[self.next_parent] = 0
        self.next_parent += 2

    @precondition(lambda self: self.parents)
    @rule(data=st.data(), allowed=st.integers(0, 6))
    def promise(self, data: st.DataObject, allowed: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.parents)))
        may = len(self.open) < min(self.LIMIT, allowed) and self.parents[parent] < MAX_REFUSED
        assert self.table.room(parent, allowed) is may
        if may:
            self.table.promised(self.next_push, parent)
            self.open[self.next_push] = parent
            self.promised.add(parent)
            self.next_push += 2

    @precondition(lambda self: self.open)
    @rule(data=st.data(), refused=st.booleans())
    def end_push(self, data: st.DataObject, refused: bool) -> None:
        sid = data.draw(st.sampled_from(sorted(self.open)))
        if refused:
            self.table.refused(sid)
            if self.open[sid] in self.parents:
                self.parents[self.open[sid]] += 1
        self.table.closed(sid)
        del self.open[sid]

    @precondition(lambda self: self.parents)
    @rule(data=st.data(), reset=st.booleans())
    def end_parent(self, data: st.DataObject, reset: bool) -> None:
        parent = data.draw(st.sampled_from(sorted(self.parents)))
        children = [sid for sid, other in self.open.items() if other == parent]
        assert sorted(self.table.children(parent)) == sorted(children)
        for sid in children if reset else ():
            self.table.closed(sid)
            del self.open[sid]
        self.table.closed(parent)
        del self.parents[parent]

    @invariant()
    def nothing_else_is_remembered(self) -> None:
        assert self.table.open == self.open
        assert len(self.table.open) <= self.LIMIT
        assert set(self.table._refused) == self.promised & set(self.parents)
        assert self.table.busy is bool(self.open or self.table._refused)


TestPromises = Promises.TestCase


def test_a_promise_on_the_wire() -> None:
    raw = Raw()
    (reply,) = started(raw, 1)
    raw.out.clear()
    push = reply.push(PATH, None)
    assert push is not None
    reply.send(b"a name")
    push.start(200, [(b"cache-control", b"private")])
    push.send(b"body")
    reply.send(b"more")
    push.end()
    raw.flush()
    kinds = [(o.type, o.sid) for o in raw.out]
    assert kinds[:3] == [(f.PUSH_PROMISE, 1), (f.DATA, 1), (f.HEADERS, 2)]
    assert Decoder().decode(raw.out[0].payload[4:], raw=True) == [
        (b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"node:8000"), (b":path", PATH),
    ]  # fmt: skip
    assert raw.body(1) == b"a namemore"
    assert raw.body(2) == b"body"
    assert not raw.core.pushes.table.open
    assert raw.shared.counts["pushed"] == 1


def test_the_table_size_update_stands_before_a_promise_too() -> None:
    """RFC 7541 4.2: at the beginning of the first header block after the change."""
    raw = Raw()
    (reply,) = started(raw, 1)
    raw.send(f.settings((1, 0)))
    pushed(reply)
    raw.flush()
    (promise,) = [o for o in raw.out if o.type == f.PUSH_PROMISE]
    assert promise.payload[4:5] == b"\x20"


@pytest.mark.parametrize("authority", [b"a" * 256, b""])
def test_no_promise_without_an_authority_that_can_be_repeated(authority: bytes) -> None:
    raw = Raw()
    fields = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", authority)]
    raw.send(f.headers(1, [field for field in fields if field[1]], end=True))
    for request in raw.requests():
        request.reply.start(200, [])
        assert request.reply.push(PATH, None) is None
    raw.flush()
    assert not promises(raw)
    assert raw.healthy


def test_no_promise_once_the_client_says_goodbye() -> None:
    raw = Raw()
    (reply,) = started(raw, 1)
    first = pushed(reply)
    raw.send(f.goaway())
    assert not reply.pushable
    assert reply.push(PATH, None) is None
    first.send(b"what was promised is finished")
    first.end()
    reply.end()
    raw.flush()
    assert raw.body(2) == b"what was promised is finished"


def test_no_promise_beside_a_push_or_an_ended_answer() -> None:
    raw = Raw()
    (reply,) = started(raw, 1)
    push = pushed(reply)
    assert push.push(PATH, None) is None
    reply.end()
    assert reply.push(PATH, None) is None
    raw.flush()
    assert raw.healthy


def test_pushes_leave_the_reserve_to_the_others() -> None:
    raw = Raw(push_reserve_bytes=10_000)
    raw.send(f.settings((4, 100_000)))
    reply, other = started(raw, 1, 3)
    push = pushed(reply)
    push.send(bytes(100_000))
    raw.flush()
    assert len(raw.body(2)) == 65_535 - 10_000
    other.send(bytes(10_000))
    raw.flush()
    assert len(raw.body(3)) == 10_000
    raw.send(f.window(0, 50_000))
    assert len(raw.body(2)) == 65_535 - 10_000 + 40_000


def test_rows_leave_the_reserve_too() -> None:
    raw = Raw(push_reserve_bytes=65_000)
    rows = RowTable(2)
    parent, other = started(raw, 1, 3)
    streams = (pushed(parent), other)
    table = np.array([b"%0500d" % 0], "S500").view("V500")
    raw.flush()
    for slot, reply in enumerate(streams):
        assert rows.join(slot, reply, b"", b"", 500)

    def step(*slots: int) -> bool:
        here, ok = np.array(slots, np.int32), np.ones(len(slots), np.bool_)
        return bool(rows.push(here, np.zeros(len(slots), np.int32), (table,), ok).all())

    assert step(0)
    assert not step(0)
    assert not step(0, 1), "what shares its write goes the slow way meanwhile"
    streams[0].end()
    parent.end()
    raw.flush()
    assert step(1)
    assert raw.core.connection_window == 65_535 - 1000


def test_client_streams_do_not_lose_places_to_pushes() -> None:
    raw = Raw(max_concurrent_streams=2)
    (reply,) = started(raw, 1)
    for _ in range(3):
        pushed(reply)
    raw.send(f.get(3))
    assert len(raw.requests()) == 2
    raw.send(f.get(5))
    assert raw.resets(5) == [code.REFUSED_STREAM]


@pytest.mark.parametrize("threshold", [1, 300, 1 << 20])
def test_what_is_kept_is_what_was_sent_rows_included(monkeypatch: pytest.MonkeyPatch, threshold: int) -> None:
    monkeypatch.setattr(push, "SORT_BYTES", threshold)
    raw = Raw()
    rows = RowTable(8)
    parent, other = started(raw, 1, 3)
    keeps = [Kept(), Kept()]
    streams = [pushed(parent, keep) for keep in keeps]
    table = np.array([b"%03d" % i for i in range(100)], "S3").view("V3")

    def join() -> None:
        for slot, reply in enumerate((*streams, other)):
            if slot not in rows:
                assert rows.join(slot, reply, b"<%d " % slot, b">", 3)

    def step(token: int) -> None:
        slots, ok = np.arange(3, dtype=np.int32), np.ones(3, np.bool_)
        assert rows.push(slots, np.full(3, token, np.int32), (table,), ok).all()

    for token in range(20):
        if token % 7 == 3:
            streams[token % 2].send(b"(slow %d)" % token)
            raw.flush()
        join()
        step(token)
    for stream in streams:
        stream.end()
    raw.flush()
    for keep, stream in zip(keeps, streams, strict=True):
        assert keep.closed is True
        assert keep.body == raw.body(stream.stream_id)
        assert keep.body.count(b"<") == 20
    assert raw.core.pushes._logged == 0


@pytest.mark.parametrize("how", ["reset", "parent", "abort", "eof", "stall"])
def test_what_breaks_off_is_kept_incomplete_and_told_once(how: str) -> None:
    raw = Raw(stall_timeout_s=1.0)
    raw.send(f.settings((4, 10)))
    (reply,) = started(raw, 1)
    keep = Kept()
    push = pushed(reply, keep)
    push.send(bytes(100))
    push.end()
    raw.flush()
    if how == "reset":
        raw.send(f.rst(2))
    elif how == "parent":
        raw.send(f.rst(1))
    elif how == "abort":
        reply.abort()
        raw.flush()
    elif how == "eof":
        raw.events += raw.core.eof(raw.now_ns)
    else:
        raw.wait(0.5)
        raw.wait(1.1)
    assert keep.closed is False
    assert push.buffered == 90, "never delivered"
    told = [e.reply for e in raw.events if isinstance(e, StreamCancelled) and e.reply is push]
    assert len(told) == 1
    assert not raw.core.pushes.table.open


def test_a_push_whose_octets_are_all_sent_is_complete() -> None:
    raw = Raw()
    (reply,) = started(raw, 1)
    keep = Kept()
    push = pushed(reply, keep)
    push.send(b"all")
    push.end()
    raw.flush()
    assert (keep.body, keep.closed) == (b"all", True)
    raw.send(f.rst(2))
    assert raw.healthy
