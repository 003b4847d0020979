"""Several engines on one node as one Replica. Each submit names its engine; so far by load, later by placement.

A slot belongs to the engine it was submitted to until its final record; engines know nothing of each other. The whole
is READY as soon as one engine is: a dead one is restarted by itself while the others serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from evap.engine.interface import OnBatch, OnState, Replica
from evap.engine.meter import Spec
from evap.errors import EngineUnavailable, InvalidRequest, StartupError
from evap.messages import FINISH_MASK, EngineInfo, GenerateRequest, ReplicaState, SamplingParams, TokenBatch

#: request, numbers of the replicas that are ready, generations running on each -> number
Choose = Callable[[GenerateRequest, Sequence[int], Sequence[int]], int]


def least_loaded(_request: GenerateRequest, ready: Sequence[int], running: Sequence[int]) -> int:
    return min(ready, key=lambda number: running[number])


class Router:
    """`choose` decides where a request goes."""

    def __init__(self, replicas: Sequence[Replica], choose: Choose = least_loaded) -> None:
        if not replicas:
            raise ValueError("a router needs a replica")
        self.replicas = tuple(replicas)
        self.choose = choose
        #: generations that each replica has been given and has not ended
        self.running = [0] * len(replicas)
        self._of: dict[int, int] = {}  # slot -> number of its replica
        self._on_batch: OnBatch = lambda _batch: None
        self._on_state: OnState = lambda _state, _line: None
        self._stopped = False

    @property
    def state(self) -> ReplicaState:
        """READY if any is; else STARTING if any is; else FAILED."""
        if self._stopped:
            return ReplicaState.STOPPED
        states = {replica.state for replica in self.replicas}
        for state in (ReplicaState.READY, ReplicaState.STARTING, ReplicaState.FAILED):
            if state in states:
                return state
        return ReplicaState.STOPPED

    @property
    def info(self) -> EngineInfo:
        """The first one's: all run the same model with the same options; max_running and kv_tokens are sums over those
        that are ready."""
        ready = [replica for replica in self.replicas if replica.state is ReplicaState.READY]
        known = [replica.info for replica in ready or self.replicas[:1]]
        one = known[0]
        many = len(known)
        return msgspec.structs.replace(one, max_running=one.max_running * many, kv_tokens=one.kv_tokens * many)

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.replicas[0].adapters)

    @property
    def restarts(self) -> int:
        return sum(getattr(replica, "restarts", 0) for replica in self.replicas)

    @property
    def mismatches(self) -> int:
        return sum(getattr(replica, "mismatches", 0) for replica in self.replicas)

    @property
    def kv_usage(self) -> float:
        """Of all engines; they are alike."""
        return sum(getattr(replica, "kv_usage", 0.0) for replica in self.replicas) / len(self.replicas)

    @property
    def beats(self) -> int:
        return sum(getattr(replica, "beats", 0) for replica in self.replicas)

    @property
    def step_since_ns(self) -> int:
        """When the oldest step began that an engine computes; 0: none does."""
        since = [getattr(replica, "step_since_ns", 0) for replica in self.replicas]
        return min((ns for ns in since if ns), default=0)

    @property
    def engines(self) -> int:
        return len(self.replicas)

    @property
    def runs_ahead(self) -> bool:
        return any(replica.runs_ahead for replica in self.replicas)

    @property
    def meters(self) -> Sequence[Spec]:
        return [spec for replica in self.replicas for spec in replica.meters]

    @meters.setter
    def meters(self, specs: Sequence[Spec]) -> None:
        for replica, spec in zip(self.replicas, specs, strict=True):
            replica.meters = [spec]

    def listen(self, on_batch: OnBatch, on_state: OnState) -> None:
        self._on_batch, self._on_state = on_batch, on_state
        for number, replica in enumerate(self.replicas):
            replica.listen(partial(self._batch, number), partial(self._state, number))

    async def start(self) -> None:
        """Return when all are READY. Raises StartupError when one can never be; the others are stopped then."""
        results = await asyncio.gather(*(replica.start() for replica in self.replicas), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            await self.stop()
            raise next((e for e in failed if isinstance(e, StartupError)), failed[0])

    def check(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Raises InvalidRequest for what `submit` would refuse (see VllmReplica.check)."""
        for replica in self.replicas:
            if replica.state is ReplicaState.READY:
                replica.check(sampling, prompt_ids)

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None:
        ready = [n for n, replica in enumerate(self.replicas) if replica.state is ReplicaState.READY]
        if not ready:
            raise EngineUnavailable("no engine is ready", retry_after_s=5)
        number = self.choose(request, ready, self.running)
        self._of[slot] = number
        self.running[number] += 1
        try:
            self.replicas[number].submit(slot, generation, request)
        except InvalidRequest:
            self._ended(slot)
            raise

    def cancel(self, slot: int, generation: int) -> None:
        number = self._of.get(slot)
        if number is not None:
            self.replicas[number].cancel(slot, generation)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    def _batch(self, _number: int, batch: TokenBatch) -> None:
        final = batch.flags & np.uint8(FINISH_MASK)
        if final.any():
            for slot in batch.slot[final != 0].tolist():
                self._ended(slot)
        self._on_batch(batch)

    def _ended(self, slot: int) -> None:
        self.running[self._of.pop(slot)] -= 1

    def _state(self, number: int, state: ReplicaState, line: str) -> None:
        whole = self.state
        others = f"; {sum(r.state is ReplicaState.READY for r in self.replicas)} of {len(self.replicas)} serve"
        self._on_state(whole, f"replica {number}: {line}" + (others if state is not whole else ""))
