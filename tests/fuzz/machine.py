"""A client and the whole server without sockets, driven by a list of moves: legal ones through h2, and raw frames.

After each move both sides agree: h2's windows at the client are ours at the server, the stream table is what the client
has open, and what is held is bounded. At the end everything is settled, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import h2.events
import h2.exceptions
from h2.settings import SettingCodes
from hypothesis import strategies as st

from evap.protocol.events import Event, RequestReady
from tests.protocol import frames as f
from tests.test_equivalence import Pair

HEAD: Final = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/v1/chat/completions")]
SIDS: Final = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 9, 101])
RAW: Final = st.one_of(
    st.builds(f.frame, st.sampled_from([*range(10), f.ALTSVC, f.PRIORITY_UPDATE, 0xEE]), st.integers(0, 255), SIDS,
              st.one_of(st.binary(max_size=12), st.just(f.block(f.GET)), st.just(f.block(f.POST)))),
    st.builds(f.window, SIDS, st.sampled_from([0, 1, 70_000, (1 << 31) - 1])),
    st.builds(f.data, SIDS, st.binary(max_size=3)),
)  # fmt: skip
MOVES: Final = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.integers(1, 3), st.integers(1, 30), st.booleans(), st.booleans()),
        st.tuples(st.just("push"), st.integers(2, 3), st.integers(1, 30)),
        st.tuples(st.just("allow"), st.sampled_from([SettingCodes.ENABLE_PUSH, SettingCodes.MAX_CONCURRENT_STREAMS]),
                  st.integers(0, 1)),
        st.tuples(st.just("begin"), st.booleans()),
        st.tuples(st.just("body"), st.integers(0, 3), st.integers(0, 400), st.booleans()),
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("widen"), st.integers(0, 4), st.integers(1, 3000)),
        st.tuples(st.just("initial"), st.integers(0, 5000)),
        st.tuples(st.just("reset"), st.integers(0, 4)),
        st.tuples(st.just("ping")),
        st.tuples(st.just("urgency"), st.integers(0, 9), st.binary(max_size=6)),
        st.tuples(st.just("turn")),
        st.tuples(st.just("raw"), RAW),
    ),
    max_size=30,
)  # fmt: skip


class Machine(Pair):
    """`play` a list of moves, then `finish`."""

    def __init__(self, window: int) -> None:
        self.handed = 0
        self.raw = False  # after raw frames the client's view is not the server's any more
        self.half: dict[int, bytearray] = {}  # requests whose body has not ended
        super().__init__(window)
        on_event = self.app.on_event

        def counting(event: Event) -> None:
            self.handed += isinstance(event, RequestReady)
            on_event(event)

        self.app.on_event = counting  # type: ignore[method-assign]

    def play(self, moves: list[tuple[Any, ...]]) -> None:
        for name, *args in moves:
            with contextlib.suppress(h2.exceptions.ProtocolError):  # what h2 does not let a client do
                getattr(self, f"_{name}")(*args)
            if self.server.closing:
                return
            self.pump_all()
            self.check()

    def pump_all(self) -> None:
        try:
            self.pump()
        except h2.exceptions.ProtocolError as error:
            if not self.raw:
                raise AssertionError(f"what we sent was wrong: {error!r}") from error

    def seen(self, event: Any) -> None:
        super().seen(event)
        if isinstance(event, h2.events.StreamReset):
            self.open.discard(event.stream_id)
            self.half.pop(event.stream_id, None)
        elif isinstance(event, h2.events.PushedStreamReceived):
            self.open.add(int(event.pushed_stream_id or 0))

    # moves

    def _request(self, n: int, tokens: int, stream: bool, stop: bool) -> None:
        more: dict[str, Any] = {"stop": ["\u2603 never"]} if stop else {}
        self.request(n=n, max_tokens=tokens, stream=stream, **more)

    def _push(self, n: int, tokens: int) -> None:
        self.request(push=True, n=n, max_tokens=tokens, stream_options={"include_usage": True})

    def _allow(self, setting: SettingCodes, value: int) -> None:
        self.client.update_settings({setting: value})

    def _begin(self, declared: bool) -> None:
        sid = self.client.get_next_available_stream_id()
        self.client.send_headers(sid, [*HEAD, ("content-length", "400")] if declared else HEAD)
        self.half[sid] = bytearray()
        self.open.add(sid)

    def _body(self, which: int, size: int, last: bool) -> None:
        if not self.half:
            return
        sid = sorted(self.half)[which % len(self.half)]
        self.client.send_data(sid, b" " * size, end_stream=last)
        if last:
            del self.half[sid]

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.loop.run(0.001)
            self.pump_all()

    def _widen(self, which: int, more: int) -> None:
        if self.open:
            self.client.increment_flow_control_window(more, sorted(self.open)[which % len(self.open)])

    def _initial(self, window: int) -> None:
        self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})

    def _reset(self, which: int) -> None:
        if self.open:
            sid = sorted(self.open)[which % len(self.open)]
            self.open.discard(sid)
            self.half.pop(sid, None)
            self.client.reset_stream(sid, 8)

    def _ping(self) -> None:
        self.client.ping(b"8 octets")

    def _urgency(self, sid: int, value: bytes) -> None:
        self._feed(f.priority_update(2 * sid + 1, value))

    def _turn(self) -> None:
        self._events(self.server.tick(int(self.loop.now * 1e9)))

    def _raw(self, frame: bytes) -> None:
        self.raw = True
        self._feed(frame)

    def _feed(self, data: bytes) -> None:
        self.pump_all()
        self._events(self.server.receive(data, int(self.loop.now * 1e9)))

    def _events(self, events: list[Event]) -> None:
        for event in events:
            self.app.on_event(event)

    # what must hold

    def check(self) -> None:
        server = self.server
        held = sum(sum(map(len, stream.chunks)) for stream in server.streams.values())
        same(server.shared.body_bytes, held, "octets of bodies that are counted, and that are held")
        assert not self.log, self.log
        if self.raw:
            return
        ours, theirs = server.conn.outbound_flow_control_window, self.client.inbound_flow_control_window
        same(ours, theirs, "the connection's window, here and at the client")
        alive = {sid for sid, stream in self.client.streams.items() if not stream.closed}
        more = set(server.streams) - alive - set(self.half)
        assert not more, f"streams that the client has not: {more}"
        for sid in set(server.streams) & alive:
            if not server.streams[sid].on_rows:
                theirs = self.client.streams[sid].inbound_flow_control_window
                same(server.stream_window(sid), theirs, f"the window of stream {sid}, here and at the client")

    def finish(self) -> None:
        """The client goes; nothing may be left, and each exchange is settled once."""
        self._events(self.server.eof(int(self.loop.now * 1e9)))
        for _ in range(60):
            self.loop.run(0.01)
        self.dispatch.steps.settle_ended()
        assert not self.server.streams, f"streams are left over: {sorted(self.server.streams)}"
        assert not self.server.pushes.busy, "promises are left over"
        same(self.server.shared.body_bytes, 0, "octets of bodies that are held at the end")
        assert not self.dispatch.open, "an exchange is not settled"
        settled = [id(exchange) for exchange, _ in self.settled]
        same(len(set(settled)), len(settled), "exchanges, and how often they were settled")
        assert len(settled) <= self.handed, f"{len(settled)} were settled, of {self.handed} that were handed over"
        assert self.dispatch.steps.slots.free == self.dispatch.steps.slots.size, "a slot is lost"
        for _, usage in self.settled:
            counts = (usage.delivered, usage.emitted, usage.computed)
            assert 0 <= counts[0] <= counts[1] <= counts[2], f"delivered, emitted, computed: {counts}"
        assert not self.log, self.log


def same(one: int, other: int, what: str) -> None:
    """Its words stand in the failure also where no test runner rewrites assertions."""
    assert one == other, f"{what}: {one} and {other}"


def life(window: int, moves: list[tuple[Any, ...]]) -> Machine:
    """A failure carries the call that repeats it."""
    machine = Machine(window)
    try:
        machine.play(moves)
        machine.finish()
    except BaseException as error:
        plain = [tuple(int(part) if isinstance(part, SettingCodes) else part for part in move) for move in moves]
        error.add_note(f"to see it again: tests.fuzz.machine.life({window}, {plain})")
        raise
    return machine


def seeds() -> list[Callable[[], Machine]]:
    """Lives that have been a fault once, or that reach far."""
    rows = [("request", 2, 30, True, False), ("steps", 3), ("initial", 100), ("steps", 3), ("widen", 0, 2000)]
    return [
        lambda: life(5000, [*rows, ("steps", 12), ("reset", 0), ("steps", 5)]),
        lambda: life(9000, [("push", 3, 30), ("steps", 5), ("reset", 1), ("steps", 5), ("allow", 2, 0), ("reset", 1)]),
        lambda: life(0, [("begin", True), ("body", 0, 400, True), ("request", 1, 5, False, True), ("steps", 9)]),
        lambda: life(65_535, [("begin", False), ("raw", f.data(1, b"x")), ("reset", 0), ("turn",), ("ping",)]),
    ]
