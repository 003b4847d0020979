"""Several replicas as one, with engines that are lists."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from evap.engine.interface import OnBatch, OnState
from evap.engine.vllm.router import Router
from evap.errors import EngineUnavailable, InvalidRequest, StartupError
from evap.messages import EngineInfo, Finish, GenerateRequest, ReplicaState, SamplingParams, TokenBatch

REQUEST = GenerateRequest(prompt_ids=[1], sampling=SamplingParams(max_tokens=1))


class Toy:
    """A replica that does nothing by itself."""

    adapters: tuple[str, ...] = ()
    engines = 1
    runs_ahead = False
    meters: Sequence[dict[str, str]] = ()

    def __init__(self, *, fails: bool = False) -> None:
        self.state = ReplicaState.STARTING
        self.info = EngineInfo(
            engine="toy", device="cpu", dtype="float32", max_model_len=9, vocab_size=9, max_running=4, kv_tokens=10
        )
        self.submitted: list[tuple[int, int]] = []
        self.cancelled: list[tuple[int, int]] = []
        self.refuse = False
        self._fails = fails

    def listen(self, on_batch: OnBatch, on_state: OnState) -> None:
        self._on_batch, self._on_state = on_batch, on_state

    async def start(self) -> None:
        if self._fails:
            self.turn(ReplicaState.FAILED)
            raise StartupError("no")
        self.turn(ReplicaState.READY)

    def turn(self, state: ReplicaState) -> None:
        self.state = state
        self._on_state(state, state.value)

    def check(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> None:
        if self.refuse:
            raise InvalidRequest("refused")

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None:
        if self.refuse:
            raise InvalidRequest("refused")
        self.submitted.append((slot, generation))

    def cancel(self, slot: int, generation: int) -> None:
        self.cancelled.append((slot, generation))

    def end(self, slot: int) -> None:
        ints = [np.array([value], np.int32) for value in (slot, 0, 5, 0)]
        self._on_batch(TokenBatch(ints[0], ints[1], ints[2], ints[3], np.array([Finish.STOP], np.uint8)))

    async def stop(self) -> None:
        self.state = ReplicaState.STOPPED


def ready(*toys: Toy) -> tuple[Router, list[TokenBatch], list[tuple[ReplicaState, str]]]:
    router = Router(toys)
    batches: list[TokenBatch] = []
    states: list[tuple[ReplicaState, str]] = []
    router.listen(batches.append, lambda state, line: states.append((state, line)))
    asyncio.run(router.start())
    return router, batches, states


def test_the_least_loaded_is_chosen_and_ends_are_counted() -> None:
    a, b = Toy(), Toy()
    router, batches, _ = ready(a, b)
    for slot in range(4):
        router.submit(slot, 0, REQUEST)
    assert router.running == [2, 2]
    a.end(0)
    a.end(2)
    assert router.running == [0, 2]
    router.submit(0, 1, REQUEST)
    assert a.submitted[-1] == (0, 1)
    assert len(batches) == 2


def test_cancel_goes_where_the_slot_is() -> None:
    a, b = Toy(), Toy()
    router, _, _ = ready(a, b)
    router.submit(0, 0, REQUEST)
    router.submit(1, 0, REQUEST)
    router.cancel(1, 0)
    router.cancel(9, 0)
    assert (a.cancelled, b.cancelled) == ([], [(1, 0)])


def test_the_others_serve_while_one_is_down() -> None:
    a, b = Toy(), Toy()
    router, _, states = ready(a, b)
    a.turn(ReplicaState.FAILED)
    assert router.state is ReplicaState.READY
    assert states[-1] == (ReplicaState.READY, "replica 0: failed; 1 of 2 serve")
    router.submit(0, 0, REQUEST)
    assert b.submitted == [(0, 0)]
    b.turn(ReplicaState.FAILED)
    assert router.state.value == "failed"
    with pytest.raises(EngineUnavailable):
        router.submit(1, 0, REQUEST)


def test_a_refused_request_leaves_nothing() -> None:
    a = Toy()
    router, _, _ = ready(a)
    a.refuse = True
    with pytest.raises(InvalidRequest):
        router.check(REQUEST.sampling, [1])
    with pytest.raises(InvalidRequest):
        router.submit(0, 0, REQUEST)
    assert router.running == [0]


def test_one_that_can_never_start_stops_all() -> None:
    a, b = Toy(), Toy(fails=True)
    router = Router([a, b])
    router.listen(lambda batch: None, lambda state, line: None)
    with pytest.raises(StartupError):
        asyncio.run(router.start())
    assert a.state is ReplicaState.STOPPED
    assert router.state is ReplicaState.STOPPED


def test_info_is_of_all_together() -> None:
    router, _, _ = ready(Toy(), Toy())
    assert (router.info.max_running, router.info.kv_tokens, router.info.vocab_size) == (8, 20, 9)


def test_how_they_move_is_of_all_together() -> None:
    """Toys say nothing of it, like a replica that is no vLLM."""
    router, _, _ = ready(Toy(), Toy())
    assert (router.beats, router.step_since_ns, router.kv_usage) == (0, 0, 0)
    for replica, (beats, since, usage) in zip(router.replicas, ((5, 0, 0.5), (7, 30, 0.25)), strict=True):
        vars(replica).update(beats=beats, step_since_ns=since, kv_usage=usage)
    assert (router.beats, router.step_since_ns, router.kv_usage) == (12, 30, 0.375)


def test_a_replica_that_is_down_runs_nothing() -> None:
    a, b = Toy(), Toy()
    router, _, _ = ready(a, b)
    b.state = ReplicaState.FAILED
    assert router.info.max_running == 4
    a.state = ReplicaState.FAILED
    assert router.info.max_running == 4, "of one, for want of a better answer"
