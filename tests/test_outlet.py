"""Pushed blocks from the request to the account: each choice is one resource, counted on its own stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evap.errors import EngineFailed
from tests.pushing import WIDE, Site, events, inline, of_choice, said

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def without_id(body: bytes) -> bytes:
    first = body.index(b'"id":"') + 6
    return body.replace(body[first : body.index(b'"', first)], b"ID")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("prompt", ["canary:word", "babel: go"])
def test_pushed_blocks_are_the_inline_answers_octets(site: Site, path: str, prompt: str) -> None:
    """To the octet where every token takes the rows; else but for the spaces that only a row has."""
    ask: dict[str, Any] = {"path": path, "prompt": prompt, "n": 3, "max_tokens": 60, "seed": 5, **USAGE}
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(**ask)
    site.run(80)
    whole = without_id(inline(site, **ask))
    assert client.heads[sid]["evap-push"] == "on"
    blocks = client.blocks(sid)
    assert sorted(blocks) == [0, 1, 2, 3]
    for index in range(3):
        pushed = without_id(client.bodies[blocks[index]])
        expected = of_choice(whole, index)
        assert events(pushed) == events(expected)
        assert pushed == expected or "babel" in prompt
        assert client.heads[blocks[index]]["cache-control"] == "private, max-age=60"
    assert without_id(client.bodies[blocks[3]]) + b"data: [DONE]\n\n" == whole[whole.rindex(b'data: {"id"') :]
    assert client.bodies[sid].endswith(b"data: [DONE]\n\n")
    assert client.ended == {sid, *blocks.values()}
    pushed_exchange = site.settled[0]
    assert all(c.row_delivered > 20 for c in pushed_exchange.choices), "pushed choices are rows too"
    assert [e.account.usage.delivered for e in site.settled] == [180, 180]


def test_promise_then_name_then_answer(site: Site) -> None:
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(n=2, max_tokens=5, **USAGE)
    site.run(20)
    blocks = client.blocks(sid)
    wire = [entry for entry in client.order if entry[0] != "WindowUpdated"]
    for index, push in blocks.items():
        promised, answered = wire.index(("PushedStreamReceived", push)), wire.index(("ResponseReceived", push))
        assert promised < answered
        between = wire[promised + 1 : answered]
        assert between == [("DataReceived", sid)], f"block {index} is named between its promise and its head"
    request = client.requests[blocks[0]]
    assert request == {
        ":method": "GET", ":scheme": "http", ":authority": "node:8000",
        ":path": f"/v1/chat/completions/{events(client.bodies[blocks[0]])[0]['id']}/blocks/0",
    }  # fmt: skip
    main = [e for e in wire if e[1] == sid]
    assert main[-1] == ("StreamEnded", sid)


@pytest.mark.parametrize(
    ("push", "fields"),
    [("", {"n": 2}), ("blocks", {"n": 1}), ("blocks", {"n": 2, "stream": False}), ("yes", {"n": 2})],
)
def test_what_is_not_pushed_is_said(site: Site, push: str, fields: dict[str, Any]) -> None:
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(push=push, max_tokens=5, **fields)
    site.run(20)
    assert client.heads[sid].get("evap-push") == ("off" if push else None)
    assert not client.promised
    assert sid in client.ended


def test_a_reset_push_ends_its_choice_and_no_other(site: Site) -> None:
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(n=3, max_tokens=100, **USAGE)
    site.run(30)
    blocks = client.blocks(sid)
    client.reset(blocks[1])
    site.run(1)
    assert site.dispatch.steps.slots.free == site.dispatch.steps.slots.size - 2
    site.run(120)
    assert {sid, blocks[0], blocks[2]} <= client.ended
    (exchange,) = site.settled
    assert exchange.end == "length"
    lost = exchange.choices[1]
    assert 20 <= lost.delivered + lost.row_delivered <= lost.emitted < 40
    assert [c.emitted for c in (exchange.choices[0], exchange.choices[2])] == [100, 100]
    usage = events(client.bodies[client.blocks(sid)[3]])[0]["usage"]
    assert usage["completion_tokens"] == 200 + lost.emitted == exchange.account.usage.emitted
    assert exchange.account.usage.delivered == 200 + lost.delivered + lost.row_delivered


def test_a_reset_push_is_heard_of_while_the_engine_is_silent(tmp_path: Path) -> None:
    site = Site(tmp_path, synthetic_ttft_ms=600_000.0)
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(n=2, max_tokens=10)
    client.reset(client.blocks(sid)[1])
    site.run(2)
    assert site.dispatch.steps.slots.free == site.dispatch.steps.slots.size - 1
    assert len(site.dispatch.active) == 1


def test_after_the_second_reset_push_the_rest_is_inline(site: Site) -> None:
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(n=3, max_tokens=50, **USAGE)
    site.run(10)
    for index in (0, 1):
        client.reset(client.blocks(sid)[index], 7)
    site.run(60)
    assert sorted(client.blocks(sid)) == [0, 1, 2]
    usage = events(client.bodies[sid])[-1]
    assert usage["usage"]["completion_tokens"] == site.settled[0].account.usage.emitted
    again = client.ask(n=2, max_tokens=5)
    site.run(20)
    assert sorted(client.blocks(again)) == [0, 1], "the next request is asked anew"


def test_all_pushes_reset(site: Site) -> None:
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(n=2, max_tokens=50)
    site.run(10)
    for push in client.blocks(sid).values():
        client.reset(push)
    site.run(5)
    assert sid in client.ended
    assert client.bodies[sid].endswith(b"data: [DONE]\n\n")
    (exchange,) = site.settled
    assert exchange.end == "client_reset"
    assert site.dispatch.steps.slots.free == site.dispatch.steps.slots.size


def test_a_slow_push_holds_only_its_choice_and_settling_waits_for_it(site: Site) -> None:
    """What is not read is not delivered, and the exchange is settled when the last pushed octet is gone."""
    client = site.connect(initial_window_size=2000)
    sid = client.ask(n=2, max_tokens=60)
    site.pump()
    fast, slow = client.blocks(sid).values()
    client.conn.increment_flow_control_window(WIDE, fast)
    client.conn.increment_flow_control_window(WIDE, sid)
    site.run(80)
    assert {sid, fast} <= client.ended
    assert not site.settled
    (exchange,) = site.dispatch.open
    assert exchange.delivered(exchange.choices[0]) == 60
    assert exchange.delivered(exchange.choices[1]) < 12
    client.conn.increment_flow_control_window(WIDE, slow)
    site.pump()
    site.loop.run(0.0)
    assert site.settled == [exchange], "at once, with nothing else going on"
    assert exchange.account.usage.delivered == 120
    assert said(client.bodies[slow])[1] == "length"


def test_a_reader_that_catches_up_with_one_push_does_not_fill_the_others(site: Site) -> None:
    client = site.connect(initial_window_size=2000)
    sid = client.ask(n=2, max_tokens=200)
    site.run(60)
    one, other = client.blocks(sid).values()
    (exchange,) = site.dispatch.open
    held = len(exchange.choices[1].held)
    assert held > 10
    client.conn.increment_flow_control_window(1500, one)
    site.pump()
    assert not exchange.choices[0].held
    assert len(exchange.choices[1].held) == held
    assert client.core.streams[other].buffered < 2048


def test_a_push_that_stalls_is_given_up_alone(site: Site) -> None:
    client = site.connect(initial_window_size=2000)
    sid = client.ask(n=2, max_tokens=60)
    fast, slow = client.blocks(sid).values()
    client.conn.increment_flow_control_window(WIDE, fast)
    site.run(80)
    for _ in range(3):
        site.loop.now += site.limits.stall_timeout_s
        for event in client.core.tick(site._now_ns()):
            site.app.on_event(event)
        site.pump()
    site.run(2)
    assert client.resets == {slow: 8}
    (exchange,) = site.settled
    assert exchange.end == "length"
    assert 60 < exchange.account.usage.delivered < 72


def test_a_connection_that_is_lost_cancels_once(site: Site) -> None:
    client = site.connect(initial_window_size=WIDE)
    client.ask(n=3, max_tokens=100)
    site.run(20)
    site.clients.remove(client)
    for event in client.core.eof(site._now_ns()):
        site.app.on_event(event)
    site.run(5)
    (exchange,) = site.settled
    assert exchange.end == "client_gone"
    assert exchange.account.usage.delivered <= exchange.account.usage.emitted
    assert not site.dispatch.blocks.size


def test_a_failed_engine_ends_every_stream_with_the_error(site: Site) -> None:
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(n=2, max_tokens=100)
    site.run(10)
    site.dispatch.fail_all(EngineFailed("broken"))
    site.run(5)
    blocks = client.blocks(sid)
    assert client.ended == {sid, *blocks.values()}
    for stream in (sid, *blocks.values()):
        assert events(client.bodies[stream])[-1]["error"]["message"] == "broken"
    assert client.bodies[sid].endswith(b"data: [DONE]\n\n")


def test_trailers_say_what_was_delivered_by_all_streams(site: Site) -> None:
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(te=True, n=2, max_tokens=30)
    site.run(50)
    assert client.trailers[sid]["evap-usage-delivered"] == "60"


def test_more_choices_than_promises(tmp_path: Path) -> None:
    site = Site(tmp_path, protocol={"push_max_promises": 2})
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(n=4, max_tokens=20, **USAGE)
    site.run(40)
    assert sorted(client.blocks(sid)) == [0, 1]
    whole = client.bodies[sid]
    for index in (2, 3):
        assert said(of_choice(whole, index))[1:] == ("length", ["assistant"])
    assert site.settled[0].account.usage.delivered == 80
    assert events(whole)[-1]["usage"]["completion_tokens"] == 80


# Fetching again


def test_the_same_get_gives_the_same_octets_for_a_minute(site: Site) -> None:
    client = site.connect(initial_window_size=3000)
    sid = client.ask(n=2, max_tokens=60)
    for _ in range(100):
        site.run(1)
        for push in client.promised.values():
            if push not in client.ended:
                client.conn.increment_flow_control_window(500, push)
    other = site.connect(initial_window_size=WIDE)
    for path, push in client.promised.items():
        assert other.fetch(path) == ("200", client.bodies[push])
        assert other.fetch(path.replace("/blocks/", "/blocks/9"))[0] == "404"
    site.loop.now += 59
    path, push = next(iter(client.promised.items()))
    assert other.fetch(path) == ("200", client.bodies[push])
    site.loop.now += 2
    assert other.fetch(path)[0] == "404"
    assert site.dispatch.blocks.size == 0
    assert sid in client.ended


def test_how_long_and_how_much_are_options(tmp_path: Path) -> None:
    for options, statuses in (({"push_keep_s": 5.0}, ["200", "404"]), ({"push_memory_bytes": 100}, ["404", "404"])):
        site = Site(tmp_path / str(options), protocol=options)
        client = site.connect(initial_window_size=WIDE)
        client.ask(n=2, max_tokens=10)
        site.run(20)
        path = next(iter(client.promised))
        found = [client.fetch(path)[0]]
        site.loop.now += 6
        assert [*found, client.fetch(path)[0]] == statuses


def test_no_promises_at_all(tmp_path: Path) -> None:
    site = Site(tmp_path, protocol={"push_max_promises": 0})
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(n=2, max_tokens=10)
    site.run(20)
    assert client.heads[sid]["evap-push"] == "off"
    assert not client.promised


def test_a_get_waits_for_the_end_of_a_block(site: Site) -> None:
    client = site.connect(initial_window_size=WIDE)
    sid = client.ask(n=2, max_tokens=60)
    site.run(10)
    (first, push), (second, lost) = client.promised.items()
    waiting, broken = client.get(first), client.get(second)
    site.run(10)
    assert waiting not in client.heads
    client.reset(lost)
    site.run(1)
    assert client.heads[broken][":status"] == "404"
    site.run(60)
    assert client.heads[waiting][":status"] == "200"
    assert client.bodies[waiting] == client.bodies[push]
    assert client.heads[waiting]["cache-control"] == "private, max-age=60"
    assert sid in client.ended


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, key_settings={"one": {}, "two": {"admin": True}})
    client, other = site.connect("one", initial_window_size=WIDE), site.connect("two", initial_window_size=WIDE)
    client.ask(n=2, max_tokens=10)
    site.run(30)
    path = next(iter(client.promised))
    assert "authorization" not in client.requests[client.promised[path]]
    assert client.fetch(path)[0] == "200"
    assert other.fetch(path)[0] == "404"
