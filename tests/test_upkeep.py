"""What time makes of open exchanges: comments, deadlines, the wait for a first token."""

from __future__ import annotations

import pytest

from evap.errors import InvalidRequest
from evap.exchange import State
from tests.test_dispatch import House
from tests.test_waiting import Line


@pytest.fixture
def line() -> Line:
    return Line()


def test_comments_only_for_the_silent_and_only_in_streams() -> None:
    house = House()
    house.replica.hang()
    streamed, whole = house.ask(stream=True), house.ask(stream=False)
    for _ in range(3):
        house.dispatch.upkeep.tick()
    assert streamed.body.count(b": waiting") == 2, "not in the first period"
    assert not whole.body
    house.replica.resume()
    house.loop.run()
    house.dispatch.upkeep.tick()
    assert streamed.body.count(b": waiting") == 2
    assert not house.dispatch.upkeep._progress


# Deadlines


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "soon", "604800001", "9" * 11, "1e3", "٣"])
def test_a_malformed_deadline_is_refused(line: Line, value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        line.send("a", headers={"evap-deadline-ms": value})
    assert refused.value.param == "evap-deadline-ms"
    assert not line.dispatch.open


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_that_cannot_be_kept(stream: bool) -> None:
    """The queue's pace is 10 ms a request: who stands far beyond his deadline is told at once, the others wait."""
    line = Line(synthetic_step_ms=10)
    for number in range(60):
        line.send(f"r{number}")
    line.send("early", headers={"evap-deadline-ms": "1"})
    line.loop.run(0.2)
    assert line.hits == {"deadline": 1}, "without a pace it had to wait for its deadline"
    waiting = line.waiting
    assert 35 < waiting < 45
    reply = line.send("late", headers={"evap-deadline-ms": "100"}, stream=stream)
    assert (reply.status, line.code(reply)) == (504, "deadline_exceeded")
    assert int(reply.headers[b"retry-after"]) == 1
    assert line.waiting == waiting
    line.send("other", peer="10.0.0.2:1", headers={"evap-deadline-ms": "100"})
    line.send("urgent", headers={"evap-deadline-ms": "100", "priority": "u=0"})
    line.send("perhaps", headers={"evap-deadline-ms": "300"})
    assert line.hits == {"deadline": 2}
    line.loop.run()
    assert "late" not in line.started
    assert line.started.index("urgent") < line.started.index("other") < 40
    usage = line.usage(reply)
    assert (usage.prompt, usage.computed, usage.delivered) == (0, 0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_that_passes_in_the_queue(line: Line, stream: bool) -> None:
    line.send("running", max_tokens=200, ignore_eos=True)
    reply = line.send("a", headers={"evap-deadline-ms": "50"}, stream=stream)
    line.loop.run(0.049)
    assert reply.status == 0
    line.loop.run(0.002)
    assert (reply.status, line.code(reply)) == (504, "deadline_exceeded")
    assert reply.headers[b"x-should-retry"] == b"false"
    line.loop.run()
    assert line.started == ["running"], "it never reached the engine"
    usage = line.usage(reply)
    assert (usage.prompt, usage.computed, usage.emitted, usage.delivered) == (0, 0, 0, 0)
    assert line.hits == {"deadline": 1}


def test_a_deadline_that_passes_in_a_stream(line: Line) -> None:
    reply = line.send("a", headers={"evap-deadline-ms": "50"}, max_tokens=1000, ignore_eos=True)
    line.loop.run()
    assert reply.status == 200
    assert reply.events[-2]["error"]["code"] == "deadline_exceeded"
    assert reply.events[-1] == "[DONE]"
    assert line.cancelled, "the engine has stopped"
    usage = line.usage(reply)
    assert 30 < usage.delivered == usage.emitted < 60
    assert line.dispatch.steps.slots.free == 256


def test_a_deadline_that_passes_in_a_whole_answer(line: Line) -> None:
    reply = line.send("a", headers={"evap-deadline-ms": "50"}, max_tokens=1000, ignore_eos=True, stream=False)
    line.loop.run()
    assert (reply.status, line.code(reply)) == (504, "deadline_exceeded")
    assert line.usage(reply).delivered == 0


def test_a_deadline_that_is_kept(line: Line) -> None:
    reply = line.send("a", headers={"evap-deadline-ms": "500"})
    line.loop.run()
    assert reply.reasons() == [(0, "length")]
    assert not len(line.dispatch.upkeep._deadlines)
    assert not line.hits


def test_no_first_token_in_time(line: Line) -> None:
    """A worker that has vanished between selection and first token, and whoever waits behind it."""
    line = Line(ttft_timeout_s=5.0)
    line.replica.hang()
    streamed, behind = line.send("a"), line.send("b", stream=False)
    line.loop.run(4.9)
    line.dispatch.upkeep.overdue()
    assert streamed.events == []
    line.loop.run(0.2)
    line.dispatch.upkeep.overdue()
    assert streamed.events[-2]["error"]["code"] == "ttft_timeout"
    assert (behind.status, line.code(behind)) == (504, "ttft_timeout")
    assert line.hits == {"ttft": 2}
    line.loop.run(0.1)
    assert [e.state for e in line.dispatch.open] == [State.ANSWERED], "its slot is the engine's until it says otherwise"
    line.replica.resume()
    line.loop.run()
    assert not line.dispatch.open
    assert line.usage(streamed).computed == 0


def test_a_first_token_in_time_is_all_that_is_asked() -> None:
    line = Line(ttft_timeout_s=0.1)
    reply = line.send("a", max_tokens=500, ignore_eos=True)
    for _ in range(10):
        line.loop.run(0.1)
        line.dispatch.upkeep.overdue()
    assert reply.reasons() == [(0, "length")]
    unlimited = Line(ttft_timeout_s=0)
    unlimited.replica.hang()
    unlimited.send("a")
    unlimited.loop.run(1e6)
    unlimited.dispatch.upkeep.overdue()
    assert not unlimited.hits
