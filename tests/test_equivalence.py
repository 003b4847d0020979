"""Rows and the slow path say the same: whatever the windows, resets, batch shapes and choices.

The real HTTP/2 core and the real dispatch, a client made of h2, no sockets. One request in four asks for a stop string
that never comes, which keeps it off the rows: it is the slow path's answer to the same prompt.
"""

from __future__ import annotations

import json
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evap.app import App
from evap.config import Config, ProtocolConfig
from evap.metrics import Metrics
from evap.protocol.connection import Http2Core
from evap.protocol.limits import Shared
from tests.fakes import run_now
from tests.test_dispatch import House

JSON = [("content-type", "application/json")]
NEVER = "\u2603 no answer says this"


class Pair(House):
    """A client and a server core, joined; `pump` carries bytes both ways until neither has any."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.app = App(Config(), self.dispatch, Metrics("synthetic"), created_s=0, background=run_now)
        limits = ProtocolConfig(stream_buffer_bytes=1024, control_burst=100_000, control_per_s=1e6)
        self.server = Http2Core(limits, peer="test", shared=Shared(admit=self.app.admit), now_ns=0)
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.client.initiate_connection()
        self.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.bodies: dict[int, bytes] = {}
        self.open: set[int] = set()
        self.pump()

    def pump(self) -> None:
        quiet = 0
        while quiet < 2:
            data = self.client.data_to_send()
            if data or self.server.unread:  # a turn handles so many frames, and the rest when it is called again
                for event in self.server.receive(data, int(self.loop.now * 1e9)):
                    self.app.on_event(event)
            out = b"".join(bytes(part) for part in self.server.take_output())
            for event in self.server.written(0, int(self.loop.now * 1e9)):
                self.app.on_event(event)
            for seen in self.client.receive_data(out) if out else ():
                self.seen(seen)
            quiet = 0 if data or out or self.server.unread else quiet + 1

    def seen(self, event: Any) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
            self.client.increment_flow_control_window(event.flow_controlled_length)  # the connection's; streams starve
        elif isinstance(event, h2.events.StreamEnded):
            self.open.discard(event.stream_id)

    def request(self, *, push: bool = False, **fields: Any) -> int:
        stream = self.client.get_next_available_stream_id()
        body = json.dumps({"messages": [{"role": "user", "content": "babel: go"}], "stream": True, **fields}).encode()
        head = {":method": "POST", ":scheme": "http", ":authority": "x", ":path": "/v1/chat/completions"}
        self.client.send_headers(stream, [*head.items(), *JSON, *([("evap-push", "blocks")] if push else [])])
        self.client.send_data(stream, body, end_stream=True)
        self.open.add(stream)
        return stream

    def widen(self, stream: int, more: int) -> None:
        if stream in self.open:
            self.client.increment_flow_control_window(more, stream)

    def answer(self, stream: int, n: int) -> tuple[list[str], dict[str, int]]:
        """Texts by choice, and the usage; the order of events is checked."""
        events = [p.removeprefix(b"data: ") for p in self.bodies[stream].split(b"\n\n") if p]
        assert events[-1] == b"[DONE]"
        parsed = [json.loads(e) for e in events[:-1]]
        assert parsed[-1]["choices"] == []
        texts, roles, ends = [""] * n, [False] * n, [False] * n
        for event in parsed[:-1]:
            (choice,) = event["choices"]
            index = choice["index"]
            assert not ends[index], "nothing follows a finish_reason"
            roles[index] = roles[index] or choice["delta"].get("role") == "assistant"
            assert roles[index], "the role comes first"
            texts[index] += choice["delta"].get("content") or ""
            ends[index] = choice["finish_reason"] is not None
        assert all(ends)
        return texts, parsed[-1]["usage"]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("widen"), st.integers(0, 3), st.integers(1, 3000)),
        st.tuples(st.just("initial"), st.integers(0, 5000)),
        st.tuples(st.just("reset")),
    ),
    max_size=25,
)


@settings(max_examples=30)
@given(window=st.integers(0, 5000), n=st.integers(1, 3), actions=ACTIONS)
@example(window=0, n=1, actions=[("initial", 689), ("steps", 1), ("initial", 0), ("steps", 1)])  # below zero
def test_rows_and_the_slow_path_agree(window: int, n: int, actions: list[tuple[Any, ...]]) -> None:
    pair = Pair(window)
    usage = {"include_usage": True}
    ask: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "stream_options": usage, "n": n, "seed": 3}
    streams = [pair.request(**ask) for _ in range(3)] + [pair.request(**ask, stop=[NEVER])]
    victim = pair.request(**ask)
    pair.pump()
    for name, *args in actions:
        if name == "steps":
            for _ in range(args[0]):
                pair.loop.run(0.001)
                pair.pump()
        elif name == "widen":
            pair.widen(streams[args[0]], args[1])
        elif name == "initial":
            pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: args[0]})
        elif victim in pair.open:
            pair.client.reset_stream(victim, 8)
            pair.open.discard(victim)
        pair.pump()
    pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
    for _ in range(90):
        pair.pump()
        pair.loop.run(0.001)
    pair.pump()
    pair.dispatch.steps.settle_ended()
    answers = [pair.answer(stream, n) for stream in streams]
    assert all(answer == answers[-1] for answer in answers)
    assert answers[0][1]["completion_tokens"] == 60 * n
    assert not pair.open
    assert len(pair.settled) == 5
    for exchange, counts in pair.settled:
        assert counts.delivered <= counts.emitted <= counts.computed
        assert exchange.end != "length" or counts.delivered == 60 * n
    assert pair.dispatch.steps.slots.free == 256
    conn = pair.server.conn
    assert conn.outbound_flow_control_window == pair.client.inbound_flow_control_window


def test_the_two_paths_are_really_two() -> None:
    pair = Pair(1 << 20)
    rows, slow = (
        pair.request(max_tokens=60, ignore_eos=True),
        pair.request(max_tokens=60, ignore_eos=True, stop=[NEVER]),
    )
    for _ in range(90):
        pair.pump()
        pair.loop.run(0.001)
    pair.dispatch.steps.settle_ended()
    took = {e.reply.stream_id: e.choices[0].row_delivered for e, _ in pair.settled}
    assert took[rows] > 20
    assert took[slow] == 0
