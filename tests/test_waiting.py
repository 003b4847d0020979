"""Between a parsed request and the engine: who goes first, and what ends a wait."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from evap.errors import Draining, Overloaded, RateLimited
from evap.messages import GenerateRequest, ReplicaState
from evap.protocol.api.router import dialects
from evap.turns import Turns
from evap.waiting import LOOK_S
from tests.fakes import FakeReply, head
from tests.test_dispatch import House


class Line(House):
    """An engine with one place, and clients with addresses. `started` names the prompts in the engine's order."""

    def __init__(self, **engine: Any) -> None:
        super().__init__(**{"max_running": 1, "synthetic_tokens": 2, **engine})
        self.started: list[str] = []
        submit = self.replica.submit

        def spy(slot: int, generation: int, request: GenerateRequest) -> None:
            self.started.append(self.dispatch.text.decode(request.prompt_ids).strip())
            submit(slot, generation, request)

        self.replica.submit = spy  # type: ignore[method-assign]

    def send(
        self, text: str, peer: str = "10.0.0.1:1", headers: dict[str, str] | None = None, **fields: Any
    ) -> FakeReply:  # fmt: skip
        reply = FakeReply(self.core, next(self._streams))
        at = head("POST", "/v1/completions", **(headers or {}))
        object.__setattr__(at, "peer", peer)
        body = {"prompt": text, "stream": True, "max_tokens": 2, **fields}
        self.dispatch.generate(reply, at, json.dumps(body).encode(), dialects()["completions"])
        return reply

    @property
    def waiting(self) -> int:
        return len(self.dispatch.room.line)

    @property
    def hits(self) -> dict[str, int]:
        return {limit: count for limit, count in self.dispatch.limits.items() if count}

    def code(self, reply: FakeReply) -> str:
        code: str = json.loads(reply.body)["error"]["code"]
        return code


@pytest.fixture
def line() -> Line:
    return Line()


def test_an_idle_engine_is_given_a_request_at_once(line: Line) -> None:
    line.send("a")
    assert line.started == ["a"]
    line.send("b")
    assert (line.started, line.waiting) == (["a"], 1)
    line.loop.run()
    assert (line.started, line.waiting) == (["a", "b"], 0)


def test_nothing_is_tokenized_or_given_a_slot_while_it_waits(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.send("a")
    seen: list[str] = []
    encode = line.dispatch.text.encode

    def spy(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    monkeypatch.setattr(line.dispatch.text, "encode", spy)
    reply = line.send("b")
    assert not seen
    assert line.dispatch.steps.slots.free == 255
    assert reply.status == 0, "an error can still be a status"
    line.loop.run()
    assert seen == ["b"]
    assert reply.ended


def test_one_caller_with_hundreds_delays_another_by_one(line: Line) -> None:
    for number in range(300):
        line.send(f"hog{number}")
    line.send("other", peer="10.0.0.2:1")
    line.send("same host", peer="10.0.0.2:2")
    line.loop.run()
    assert line.started.index("other") == 2
    assert line.started.index("same host") == 4
    assert len(line.settled) == 302


def test_urgency_orders_the_queue(line: Line) -> None:
    line.send("running")
    line.send("ordinary")
    line.send("background", headers={"priority": "u=7, i"})
    line.send("urgent", headers={"priority": "u=0"})
    line.send("malformed", headers={"priority": "u=0 or so"})
    line.send("body", priority=-1)
    line.send("body before header", priority=5, headers={"priority": "u=0"})
    line.loop.run()
    assert line.started[1:] == [
        "urgent", "body", "ordinary", "malformed", "background", "body before header",
    ]  # fmt: skip


def test_a_priority_update_moves_what_waits(line: Line) -> None:
    line.send("running")
    replies = [line.send(name) for name in ("a", "b", "c")]
    line.dispatch.prioritized(replies[2], b"u=1")
    line.dispatch.prioritized(replies[0], b"u=6")
    line.dispatch.prioritized(replies[1], b"nonsense(")
    line.loop.run()
    assert line.started[1:] == ["c", "b", "a"]
    line.dispatch.prioritized(replies[0], b"u=0")  # over: nothing happens


def test_a_full_queue_pushes_back_on_who_fills_it() -> None:
    line = Line(max_queued_requests=3)
    line.send("running")
    mine = [line.send(f"mine{number}") for number in range(3)]
    with pytest.raises(RateLimited) as refused:
        line.send("one more")
    assert refused.value.retry_after_s
    line.send("other", peer="10.0.0.2:1")
    assert mine[-1].status == 429
    assert mine[-1].headers[b"retry-after"]
    assert line.code(mine[-1]) == "queue_share"
    line.send("third", peer="10.0.0.3:1")
    with pytest.raises(Overloaded):
        line.send("fourth", peer="10.0.0.4:1")
    line.loop.run()
    assert line.started == ["running", "mine0", "other", "third"]
    assert line.hits == {"queue_share": 1, "queue_full": 1, "queue_pushed_out": 2}
    assert sum(usage.prompt + usage.computed for _, usage in line.settled if not usage.delivered) == 0


def test_prompts_are_a_limit_before_they_are_tokens() -> None:
    line = Line(max_queued_tokens=1000)
    line.send("running")
    line.send("x" * 3000)
    with pytest.raises(RateLimited):
        line.send("y" * 3000)


def test_large_prompts_are_bounded_too_when_the_pool_is_faster_than_the_engine() -> None:
    line = Line(max_queued_requests=5)
    line.send("running", max_tokens=1000, ignore_eos=True)
    for number in range(5):
        line.send(f"large{number} " + "x" * 20_000)
        work, back = line.pool.pop()
        back(work())
    with pytest.raises(RateLimited):
        line.send("one more " + "x" * 20_000)
    assert (line.waiting, len(line.pool)) == (5, 0)
    line.loop.run()
    assert len(line.settled) == 6


def test_a_large_request_for_which_not_enough_can_be_pushed_out(line: Line) -> None:
    line = Line(max_queued_tokens=4000)
    line.send("running", max_tokens=1000, ignore_eos=True)
    for number in range(10):
        for peer in ("10.0.0.1:1", "10.0.0.2:1"):
            line.send(f"{number}" + "x" * 660, peer=peer)
    large = line.send("y" * 7000, peer="10.0.0.3:1")
    assert (large.status, line.code(large)) == (429, "queue_share")
    assert line.waiting == 18
    line.loop.run()
    assert not line.dispatch.open
    assert line.dispatch.room.line.tokens == 0


def test_large_prompts_take_turns_in_the_pool_and_then_in_the_engine(line: Line) -> None:
    line.send("running")
    large = [line.send(f"large{number} " + "x" * 20_000) for number in range(6)]
    other = line.send("other " + "x" * 20_000, peer="10.0.0.2:1")
    assert len(line.pool) == 4, "the rest waits where order is fair"
    names = []
    while line.pool:
        work, back = line.pool.pop(0)
        prompt = work()
        names.append(line.dispatch.text.decode(prompt.ids).strip().split()[0])
        back(prompt)
    assert names == ["large0", "large1", "large2", "large3", "large4", "other", "large5"]
    line.loop.run()
    assert all(reply.ended for reply in (*large, other))
    assert [name.split()[0] for name in line.started[:3]] == ["running", "large0", "other"]


def test_a_request_that_leaves_while_it_waits_costs_the_engine_nothing(line: Line) -> None:
    line.send("running")
    replies = [line.send(name) for name in ("a", "b", "c")]
    line.dispatch.cancelled(replies[1], "client_reset")
    assert line.waiting == 2
    line.loop.run()
    assert line.started == ["running", "a", "c"]
    usage = line.usage(replies[1])
    assert (usage.prompt, usage.computed, usage.delivered) == (0, 0, 0)
    assert line.end(replies[1]) == "client_reset"


def test_what_waits_when_a_drain_begins_is_served(line: Line) -> None:
    line.send("running")
    reply = line.send("a")
    line.dispatch.draining = True
    with pytest.raises(Draining):
        line.send("late")
    line.loop.run()
    assert reply.reasons() == [(0, "length")]


def test_what_still_waits_at_the_end_of_a_drain_is_told(line: Line) -> None:
    line.send("running", max_tokens=1000, ignore_eos=True)
    reply = line.send("a")
    line.dispatch.draining = True
    line.dispatch.fail_all(Draining("the server shut down before this answer was complete", retry_after_s=5))
    line.loop.run()
    assert (reply.status, line.code(reply), line.waiting) == (503, "draining", 0)
    assert line.started == ["running"]
    assert not line.dispatch.open


def test_an_engine_that_dies_takes_no_waiting_request_with_it(line: Line) -> None:
    """They are told to go elsewhere, and none of them reaches the engine that is about to be gone."""
    line.send("running")
    reply = line.send("a")
    line.replica.listen(line.dispatch.steps.on_batch, lambda state, text: line.dispatch.engine_lost())
    line.replica.fail("broken", restart_s=1.0)
    assert (reply.status, line.code(reply)) == (503, "engine_unavailable")
    line.loop.run()
    assert line.started == ["running"]
    assert line.send("b").started


def test_an_engine_that_runs_more_than_before_takes_what_waits(line: Line) -> None:
    """A second replica is ready: places come without a slot being given back."""
    line.send("running", max_tokens=1000, ignore_eos=True)
    line.send("a")
    line.send("b")
    info = line.replica.info
    more = msgspec.structs.replace(info, max_running=2)
    line.dispatch.replica = SimpleNamespace(info=more, state=ReplicaState.READY, **{
        name: getattr(line.replica, name) for name in ("submit", "check", "cancel", "adapters")
    })  # fmt: skip
    line.dispatch.engine_ready()
    line.loop.run(0.0)
    assert line.started == ["running", "a"]


def test_a_long_wait_shows_life(line: Line) -> None:
    line.send("running", max_tokens=1000, ignore_eos=True)
    streamed, whole = line.send("a"), line.send("b", stream=False)
    line.dispatch.upkeep.tick()
    assert streamed.status == 0
    line.dispatch.upkeep.tick()
    assert (streamed.status, streamed.body) == (200, b"")
    line.dispatch.upkeep.tick()
    assert streamed.body == b": waiting\n\n"
    assert whole.status == 0
    line.loop.run()
    assert streamed.reasons() == [(0, "length")]
    assert whole.status == 200


def lines(count: int, **engine: Any) -> list[Line]:
    """Processes that fill one engine."""
    memory = memoryview(bytearray(Turns.size(count)))
    found = [Line(**engine) for _ in range(count)]
    for number, it in enumerate(found):
        it.dispatch.room.share(Turns(memory, process=number, processes=count), it.loop.call_later)
    return found


def test_places_that_another_process_has_taken_are_taken() -> None:
    one, other = lines(2, max_running=8, synthetic_tokens=50)
    for number in range(20):
        one.send(f"a{number}", max_tokens=50)
    assert (len(one.started), one.waiting) == (9, 11)  # eight, and one ahead
    for number in range(20):
        other.send(f"b{number}", max_tokens=50)
    assert (len(other.started), other.waiting) == (4, 16)  # an even part, whatever the first one has
    one.loop.run()
    assert (len(one.started), one.waiting) == (20, 0)
    assert len(other.started) == 4
    other.loop.run(LOOK_S)  # it looks around while somebody waits
    assert len(other.started) >= 9
    other.loop.run()
    assert (len(other.started), other.waiting) == (20, 0)
    one.send("late", max_tokens=2)
    assert one.started[-1] == "late"


def test_a_caller_owes_the_turns_that_another_process_gave_him() -> None:
    one, other = lines(2)
    for it in (one, other):
        for number in range(30):
            it.send(f"hog{number}", "10.0.0.1:1")
    for number in range(30):
        one.send(f"one{number}", "10.0.0.2:1")
    for _ in range(40):
        other.loop.run(0.01)
        one.loop.run(0.01)
    both = one.started[:20] + other.started[:20]
    assert 15 <= sum(name.startswith("one") for name in both) <= 20
