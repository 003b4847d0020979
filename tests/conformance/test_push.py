"""Cases 53-56: server push."""

from __future__ import annotations

from pathlib import Path

import pytest

from evap.protocol import headers as code
from evap.protocol.events import Reply
from tests.conformance.cases import case
from tests.protocol import frames as f
from tests.protocol.joined import Raw
from tests.protocol.test_push import PATH, promises, pushed, started
from tests.pushing import WIDE, Site

ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 2, 3


@case(53, "RFC 9113 6.6", "RFC 9113 8.4.2")
@pytest.mark.parametrize("when", ["promised", "headed", "sending", "ended", "after"])
@pytest.mark.parametrize("error", [code.CANCEL, code.REFUSED_STREAM])
def test_a_reset_promise_ends_alone(when: str, error: int) -> None:
    raw = Raw()
    raw.send(f.settings((4, 10)))
    (reply,) = started(raw, 1)
    first, second = reply.push(PATH, None), pushed(reply)
    assert first is not None
    if when != "promised":
        first.start(200, [])
    if when in ("sending", "ended"):
        first.send(bytes(100))
    if when in ("ended", "after"):
        first.end()
    raw.flush()
    raw.out.clear()
    raw.send(f.rst(2, error), f.window(2, 100), f.rst(2, error))
    first.start(200, [])
    first.send(b"nobody reads this")
    first.end()
    second.send(b"second")
    second.end()
    reply.send(b"parent")
    reply.end()
    raw.flush()
    assert [o for o in raw.out if o.sid == 2] == []
    assert raw.body(4) == b"second"
    assert raw.body(1) == b"parent"
    assert raw.healthy
    assert raw.cancelled() == ([] if when == "after" else ["client_reset"])
    assert not raw.core.streams


@case(53, "RFC 9113 5.1.1")
@pytest.mark.parametrize("frame", [f.data(2, b"x"), f.headers(2, end=True)])
def test_a_client_may_not_send_on_a_promised_stream(frame: bytes) -> None:
    raw = Raw()
    pushed(started(raw, 1)[0])
    raw.flush()
    raw.send(frame)
    assert raw.goaway in (code.PROTOCOL_ERROR, code.STREAM_CLOSED) or raw.resets(2) == [code.STREAM_CLOSED]


@case(53, "CVE-2023-44487")
def test_resets_of_promises_are_counted() -> None:
    raw = Raw(reset_burst=10, reset_per_s=0.1, push_max_promises=1000)
    for sid in range(1, 201, 2):
        if not raw.healthy:
            break
        (reply,) = started(raw, sid)
        if reply.pushable:
            push = pushed(reply)
            raw.flush()
            raw.send(f.rst(push.stream_id))
        reply.end()
        raw.flush()
    assert raw.goaway == code.ENHANCE_YOUR_CALM
    assert len(promises(raw)) == 11


@case(54, "RFC 9113 6.5.2", "RFC 9113 8.4")
def test_no_promise_to_a_client_that_switched_push_off() -> None:
    raw = Raw(greet=False)
    raw.send(f.hello((ENABLE_PUSH, 0)))
    (reply,) = started(raw, 1)
    assert not reply.pushable
    assert reply.push(PATH, None) is None
    raw.send(f.settings((ENABLE_PUSH, 1)))
    assert pushed(reply)
    raw.send(f.settings((ENABLE_PUSH, 0)))
    assert reply.push(PATH, None) is None
    raw.flush()
    assert promises(raw) == [(1, 2)]
    assert raw.healthy


@case(54, "RFC 9113 5.1.2", "RFC 9113 8.4")
def test_promises_stay_below_the_clients_limit() -> None:
    raw = Raw(greet=False)
    raw.send(f.hello((MAX_CONCURRENT_STREAMS, 0)))
    (reply,) = started(raw, 1)
    assert reply.push(PATH, None) is None
    raw.send(f.settings((MAX_CONCURRENT_STREAMS, 3)))
    pushes = [pushed(reply) for _ in range(3)]
    assert reply.push(PATH, None) is None
    raw.send(f.settings((MAX_CONCURRENT_STREAMS, 1)))  # lowered mid-way: what is open may end, nothing new begins
    for number, push in enumerate(pushes):
        assert reply.push(PATH, None) is None, number
        push.end()
        raw.flush()
    assert pushed(reply)
    assert reply.push(PATH, None) is None
    raw.flush()
    assert promises(raw) == [(1, 2), (1, 4), (1, 6), (1, 8)]


@case(54, "RFC 9113 8.4")
def test_300_promises_are_made_32_at_a_time() -> None:
    raw = Raw()
    replies = started(raw, *range(1, 601, 2)[:250])
    asked = [reply.push(PATH, None) for reply in [*replies, *replies[:50]]]
    made = [push for push in asked if push is not None]
    assert len(asked) == 300
    assert len(made) == 32
    for push in made:
        push.start(200, [])
        push.end()
    raw.flush()
    assert raw.healthy
    assert [sid for _, sid in promises(raw)] == list(range(2, 66, 2))
    assert replies[0].pushable


@case(55, "RFC 9113 8.4", "RFC 9113 6.4")
@pytest.mark.parametrize("how", ["client", "server"])
def test_a_reset_parent_takes_its_pushes_with_it(how: str) -> None:
    raw = Raw()
    parent, other = started(raw, 1, 3)
    mine: list[Reply] = [pushed(parent), pushed(parent)]
    its = pushed(other)
    ended = pushed(parent)
    ended.end()
    raw.flush()
    if how == "client":
        raw.send(f.rst(1))
    else:
        parent.abort()
        raw.flush()
    assert [raw.resets(sid) for sid in (2, 4, 6, 8)] == [[code.CANCEL], [code.CANCEL], [], []]
    assert [push.alive for push in mine] == [False, False]
    its.send(b"goes on")
    its.end()
    raw.flush()
    assert raw.body(6) == b"goes on"
    assert raw.healthy


@case(55, "RFC 9113 8.4")
def test_pushes_outlive_a_parent_that_has_ended() -> None:
    raw = Raw()
    (parent,) = started(raw, 1)
    push = pushed(parent)
    parent.end()
    raw.flush()
    raw.send(f.rst(1))
    push.send(b"later")
    push.end()
    raw.flush()
    assert raw.body(2) == b"later"
    assert raw.resets() == []


@case(56, "RFC 9110 9.3.1", "RFC 9113 8.4")
def test_a_pushed_get_is_really_answered_for_a_minute_and_to_its_owner(tmp_path: Path) -> None:
    site = Site(tmp_path, key_settings={"owner": {}, "other": {}})
    owner, other = site.connect("owner", initial_window_size=WIDE), site.connect("other", initial_window_size=WIDE)
    owner.ask(n=2, max_tokens=10)
    site.run(20)
    assert len(owner.promised) == 2
    for path, push in owner.promised.items():
        again = owner.get(path)
        assert owner.heads[again][":status"] == owner.heads[push][":status"] == "200"
        assert owner.heads[again]["cache-control"] == owner.heads[push]["cache-control"] == "private, max-age=60"
        assert owner.bodies[again] == owner.bodies[push]
        assert other.heads[other.get(path)][":status"] == "404"
        assert owner.heads[owner.get(path[:-1] + "7")][":status"] == "404"
    site.loop.now += 61
    for path in owner.promised:
        assert owner.heads[owner.get(path)][":status"] == "404"
