"""Any mix of requests, cancels, deadlines, updates, engine deaths and a drain: nobody is lost, nobody runs twice, and
the engine is never given more than it has places for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evap.admission import Stage
from evap.errors import Draining, EngineUnavailable, Overloaded, RateLimited
from evap.exchange import State
from evap.messages import ReplicaState
from tests.fakes import FakeReply
from tests.test_waiting import Line

PLACES = 3
QUEUED = 6


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.line = Line(max_running=PLACES, max_queued_requests=QUEUED, max_choices=4, synthetic_tokens=3)
        self.line.replica.listen(self.line.dispatch.steps.on_batch, self._state)
        self.replies: list[FakeReply] = []
        self.names = Counter[str]()
        self.number = 0

    def _state(self, state: ReplicaState, line: str) -> None:
        if state is ReplicaState.FAILED:
            self.line.dispatch.engine_lost()

    @rule(
        peer=st.integers(1, 3), n=st.integers(1, 4), large=st.booleans(), stream=st.booleans(),
        urgency=st.sampled_from([None, 0, 7]), deadline=st.sampled_from([None, 1, 20]),
    )  # fmt: skip
    def ask(
        self, peer: int, n: int, large: bool, stream: bool, urgency: int | None, deadline: int | None
    ) -> None:  # fmt: skip
        self.number += 1
        headers = {"priority": f"u={urgency}"} if urgency is not None else {}
        if deadline is not None:
            headers["evap-deadline-ms"] = str(deadline)
        text = f"r{self.number} " + "x" * (9000 if large else 0)
        fields: dict[str, Any] = {"n": n, "stream": stream, "headers": headers}
        try:
            self.replies.append(self.line.send(text, peer=f"10.0.0.{peer}:1", **fields))
        except Draining:
            assert self.line.dispatch.draining
        except EngineUnavailable:
            assert self.line.replica.state is not ReplicaState.READY
        except (RateLimited, Overloaded):
            assert self.line.waiting >= QUEUED

    @precondition(lambda self: self.replies)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.line.dispatch.cancelled(data.draw(st.sampled_from(self.replies)), "client_reset")

    @precondition(lambda self: self.replies)
    @rule(data=st.data(), value=st.sampled_from([b"u=0", b"u=5", b"nonsense("]))
    def update(self, data: st.DataObject, value: bytes) -> None:
        self.line.dispatch.prioritized(data.draw(st.sampled_from(self.replies)), value)

    @precondition(lambda self: self.line.pool)
    @rule()
    def tokenize(self) -> None:
        work, back = self.line.pool.pop(0)
        back(work())

    @rule(ms=st.integers(0, 12))
    def wait(self, ms: int) -> None:
        self.line.loop.run(ms / 1e3)

    @rule()
    def tick(self) -> None:
        self.line.dispatch.upkeep.tick()

    @precondition(lambda self: self.line.replica.state is ReplicaState.READY)
    @rule()
    def die(self) -> None:
        self.line.replica.fail("broken", restart_s=0.005)

    @precondition(lambda self: not self.line.dispatch.draining and len(self.replies) > 10)
    @rule()
    def drain(self) -> None:
        self.line.dispatch.draining = True

    @invariant()
    def within_bounds(self) -> None:
        room, slots = self.line.dispatch.room, self.line.dispatch.steps.slots
        assert slots.size - slots.free < room.places + 4, "the last one may have four choices"
        assert self.line.waiting <= QUEUED + 4
        if room.line.waiting(Stage.ENGINE) and self.line.replica.state is ReplicaState.READY:
            assert slots.size - slots.free >= room.places, "nobody waits beside a free place"

    @invariant()
    def nobody_runs_twice(self) -> None:
        texts = Counter(text.split()[0] for text in self.line.started)
        choices = {f"r{n + 1}": 0 for n in range(self.number)}
        for exchange in (*self.line.dispatch.open, *(e for e, _ in self.line.settled)):
            choices[exchange.request.prompt_text.split()[0]] = exchange.request.n  # type: ignore[union-attr]
        assert all(count <= choices[name] for name, count in texts.items())

    def teardown(self) -> None:
        for _ in range(200):
            while self.line.pool:
                work, back = self.line.pool.pop(0)
                back(work())
            self.line.loop.run(0.05)
            if not self.line.dispatch.open:
                break
        assert not self.line.dispatch.open
        assert len(self.line.settled) == len({e for e, _ in self.line.settled}) == len(self.replies), "each once"
        assert all(e.state is State.SETTLED for e, _ in self.line.settled)
        assert not self.line.waiting
        assert self.line.dispatch.room.line.tokens == 0
        assert not self.line.dispatch.room._prompts
        assert self.line.dispatch.steps.slots.free == self.line.dispatch.steps.slots.size
        for exchange, usage in self.line.settled:
            if not exchange.choices:
                assert (usage.prompt, usage.computed, usage.delivered) == (0, 0, 0), "zero is zero"
        ends = (reply.started or reply.aborted or self.line.end(reply) == "client_reset" for reply in self.replies)
        assert all(ends), "each has an answer"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
