"""A synthetic replica with a clock that the test turns, and what it said per generation."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from evap.config import EngineConfig
from evap.engine.synthetic import SyntheticReplica, SyntheticText
from evap.messages import (
    FINISH_MASK,
    NO_TOKEN,
    SILENT,
    Finish,
    GenerateRequest,
    ReplicaState,
    SamplingParams,
    TokenBatch,
)

TEXT = SyntheticText()


class ManualClock:
    """A loop whose passes and seconds the test decides."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._soon: list[Callable[[], None]] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self.now + delay, next(self._ids), callback))

    def turn(self) -> bool:
        """One loop pass; False if nothing was due."""
        while self._later and self._later[0][0] <= self.now:
            self._soon.append(heapq.heappop(self._later)[2])
        callbacks, self._soon = self._soon, []
        for callback in callbacks:
            callback()
        return bool(callbacks)

    def advance(self, seconds: float) -> None:
        """Run everything that falls due within `seconds`, at its time."""
        end = self.now + seconds
        while self.turn() or (self._later and self._later[0][0] <= end):
            if not self._soon and self._later:
                self.now = max(self.now, min(end, self._later[0][0]))
        self.now = end


class Bench:
    """A started replica, its clock, and what it said per (slot, generation)."""

    def __init__(self, **config: Any) -> None:
        self.clock = ManualClock()
        self.replica = SyntheticReplica(EngineConfig(**{"synthetic_step_ms": 0.0, **config}), self.clock)
        self.batches: list[TokenBatch] = []
        self.states: list[ReplicaState] = []
        self.records: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        self.replica.listen(self._take, lambda state, line: self.states.append(state))
        asyncio.run(self.replica.start())

    def _take(self, batch: TokenBatch) -> None:
        self.batches.append(batch)
        columns = (batch.slot, batch.generation, batch.token, batch.index, batch.flags)
        for slot, generation, *rest in zip(*(c.tolist() for c in columns), strict=True):
            self.records[slot, generation].append((rest[0], rest[1], rest[2]))

    def submit(self, prompt: str = "hello", slot: int = 0, generation: int = 0, **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 10, **sampling})
        self.replica.submit(slot, generation, GenerateRequest(prompt_ids=TEXT.encode(prompt), sampling=params))

    def run(self, passes: int = 1000) -> None:
        for _ in range(passes):
            if not self.clock.turn():
                return

    def tokens(self, slot: int = 0, generation: int = 0) -> list[int]:
        return [t for t, _, flags in self.records[slot, generation] if not flags & NO_TOKEN]

    def text(self, slot: int = 0, generation: int = 0) -> str:
        return TEXT.decode([t for t, _, flags in self.records[slot, generation] if not flags & (NO_TOKEN | SILENT)])

    def finish(self, slot: int = 0, generation: int = 0) -> Finish:
        records = self.records[slot, generation]
        assert [index for _, index, _ in records] == list(range(len(records)))
        assert all(not flags & FINISH_MASK for _, _, flags in records[:-1])
        return Finish(records[-1][2] & FINISH_MASK) if records else Finish.NONE


def one(prompt: str = "hello", config: dict[str, Any] | None = None, **sampling: Any) -> Bench:
    bench = Bench(**(config or {}))
    bench.submit(prompt, **sampling)
    bench.run()
    return bench
