"""Pushes under any order of what a client may send and a server may do: the tables stay in step, and each ends once."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evap.protocol.events import Reply, StreamCancelled
from tests.protocol import frames as f
from tests.protocol.joined import Raw
from tests.protocol.test_push import Kept

LIMIT, RESERVE = 3, 1000


class Sequences(RuleBasedStateMachine):
    """`pushes`: every push that was made, with its keeper and what was given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = Raw(push_max_promises=LIMIT, push_reserve_bytes=RESERVE, reset_burst=10_000)
        self.allowed = 1 << 31
        self.parents: list[Reply] = []
        self.pushes: list[tuple[Any, Kept, bytearray]] = []

    @property
    def open(self) -> list[tuple[Any, Kept, bytearray]]:
        return [entry for entry in self.pushes if entry[0].alive]

    def live(self) -> bool:
        return self.raw.healthy

    @initialize(window=st.integers(0, 3000))
    def window(self, window: int) -> None:
        self.raw.send(f.settings((4, window)))

    # The server

    @precondition(lambda self: self.live() and not self.raw.core.peer_leaving and len(self.parents) < 20)
    @rule()
    def request(self) -> None:
        self.raw.send(f.get(2 * len(self.parents) + 1))
        reply = self.raw.requests()[-1].reply
        reply.start(200, [])
        self.parents.append(reply)

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.parents))
        keep, pushable = Kept(), parent.pushable
        before = len(self.raw.core.pushes.table.open)
        made = parent.push(b"/p", keep)
        assert (made is not None) is pushable
        if made is not None:
            assert before < min(LIMIT, self.allowed)
            parent.send(b"name")
            made.start(200, [])
            self.pushes.append((made, keep, bytearray()))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), size=st.integers(1, 2000))
    def send(self, data: st.DataObject, size: int) -> None:
        reply, _, given = data.draw(st.sampled_from(self.open))
        payload = bytes([len(given) % 251]) * size
        reply.send(payload)
        given += payload

    @precondition(lambda self: self.open)
    @rule(data=st.data(), abort=st.booleans())
    def end_push(self, data: st.DataObject, abort: bool) -> None:
        reply = data.draw(st.sampled_from(self.open))[0]
        (reply.abort if abort else reply.end)()

    @precondition(lambda self: self.parents)
    @rule(data=st.data(), abort=st.booleans())
    def end_parent(self, data: st.DataObject, abort: bool) -> None:
        reply = data.draw(st.sampled_from(self.parents))
        (reply.abort if abort else reply.end)()

    @rule()
    def flush(self) -> None:
        self.raw.flush()

    # The client

    def ids(self) -> list[int]:
        return [reply.stream_id for reply in self.parents] + [entry[0].stream_id for entry in self.pushes]

    @precondition(lambda self: self.live() and self.ids())
    @rule(data=st.data(), more=st.integers(1, 5000))
    def frame(self, data: st.DataObject, more: int) -> None:
        """On any stream that ever was, also one that is long closed."""
        sid = data.draw(st.sampled_from(self.ids()))
        self.raw.send(data.draw(st.sampled_from([f.rst(sid), f.window(sid, more), f.window(0, more)])))

    @precondition(lambda self: self.live())
    @rule(entry=st.sampled_from([(2, 0), (2, 1), (3, 0), (3, 2), (3, 100), (4, 0), (4, 3000)]))
    def setting(self, entry: tuple[int, int]) -> None:
        self.raw.send(f.settings(entry))
        if entry[0] == 3:
            self.allowed = entry[1]

    @precondition(lambda self: self.live() and len(self.pushes) > 3)
    @rule(how=st.sampled_from(["goaway", "data", "eof"]))
    def leave(self, how: str) -> None:
        if how == "eof":
            self.raw.events += self.raw.core.eof(self.raw.now_ns)
        else:
            self.raw.send(f.goaway() if how == "goaway" else f.data(2, b"x"))

    # Always

    @invariant()
    def in_step(self) -> None:
        core = self.raw.core
        promised = {sid for sid in core.streams if not sid & 1}
        assert promised == set(core.pushes.table.open)
        assert set(core.pushes._kept) == promised
        assert self.raw.shared.streams == len(core.streams)
        assert core.pushes.busy is core.pushes.table.busy
        for reply, keep, given in self.pushes:
            assert (keep.closed is None) is (reply.stream_id in promised)
            if keep.closed:
                assert keep.body == bytes(given)
        told = [e.reply.stream_id for e in self.raw.events if isinstance(e, StreamCancelled)]
        assert len(told) == len(set(told))

    def teardown(self) -> None:
        self.raw.events += self.raw.core.eof(self.raw.now_ns)
        self.raw.flush()
        assert not self.raw.core.streams
        assert not self.raw.core.pushes.busy
        assert all(keep.closed is not None for _, keep, _ in self.pushes)
        assert self.raw.shared.streams == 0


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=50)
