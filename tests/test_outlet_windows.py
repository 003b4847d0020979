"""Pushed and inline answers say the same, whatever the windows, resets and repeated requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pushing import WIDE, Site, inline, of_choice, said

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("widen"), st.integers(0, 4), st.integers(1, 3000)),
        st.tuples(st.just("initial"), st.integers(0, 5000)),
        st.tuples(st.just("reset"), st.integers(0, 2)),
        st.tuples(st.just("fetch"), st.integers(0, 2)),
        st.tuples(st.just("credit"), st.booleans()),
    ),
    max_size=25,
)


class Reader:
    """A client with one pushed answer and a neighbour without pushes; one method per action."""

    def __init__(self, site: Site, window: int, ask: dict[str, Any]) -> None:
        self.site = site
        self.client = site.connect(initial_window_size=window)
        self.main = self.client.ask(**ask)
        self.neighbour = self.client.ask(push="", max_tokens=60, seed=3)
        #: index -> promised stream, by what was promised: names may be waiting for a window
        self.pushes = {int(path.rpartition("/")[2]): sid for path, sid in self.client.promised.items()}
        self.lost: set[int] = set()

    def _open(self, number: int) -> int | None:
        streams = [self.main, *self.pushes.values(), self.neighbour]
        sid = streams[number % len(streams)]
        return None if sid in self.client.ended or sid in self.lost else sid

    def steps(self, count: int) -> None:
        self.site.run(count)

    def widen(self, number: int, more: int) -> None:
        if (sid := self._open(number)) is not None:
            self.client.conn.increment_flow_control_window(more, sid)

    def initial(self, window: int) -> None:
        self.client.conn.update_settings({4: window})

    def reset(self, index: int) -> None:
        sid = self.pushes.get(index)
        if sid is not None and sid not in self.client.ended and sid not in self.lost:
            self.client.reset(sid)
            self.lost.add(sid)

    def fetch(self, number: int) -> None:
        paths = sorted(self.client.promised)
        self.client.get(paths[number % len(paths)])

    def credit(self, on: bool) -> None:
        self.client.credit = on

    def finish(self) -> None:
        self.client.credit = True
        self.client.conn.update_settings({4: WIDE})
        self.client.conn.increment_flow_control_window(WIDE)
        self.site.pump()
        self.site.run(120)


@settings(max_examples=30)
@given(window=st.integers(0, 5000), n=st.integers(2, 3), actions=ACTIONS)
def test_pushed_and_inline_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, window: int, n: int, actions: list[tuple[Any, ...]]
) -> None:
    site = Site(tmp_path_factory.mktemp("site"))
    ask: dict[str, Any] = {"n": n, "max_tokens": 60, "seed": 3, "stream_options": {"include_usage": True}}
    whole = inline(site, **ask)
    site.settled.clear()
    reader = Reader(site, window, ask)
    client = reader.client
    for name, *args in actions:
        getattr(reader, name)(*args)
        site.pump()
    reader.finish()
    for index, sid in reader.pushes.items():
        if sid not in reader.lost:
            assert said(client.bodies[sid]) == said(of_choice(whole, index))
    for path, sid in client.promised.items():
        found = ("404", b"") if sid in reader.lost else ("200", client.bodies[sid])
        status, body = client.fetch(path)
        assert (status, body if status == "200" else b"") == found
    assert {reader.main, reader.neighbour} <= client.ended
    accounts_agree(site)
    assert client.core.conn.outbound_flow_control_window == client.conn.inbound_flow_control_window
    assert not client.core.pushes.busy


def accounts_agree(site: Site) -> None:
    assert len(site.settled) == 2
    for exchange in site.settled:
        usage = exchange.account.usage
        assert usage.delivered <= usage.emitted <= usage.computed
        for choice in exchange.choices:
            assert choice.delivered + choice.row_delivered == 60 or choice.reason is None
    assert site.dispatch.steps.slots.free == site.dispatch.steps.slots.size
