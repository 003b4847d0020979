"""A live vLLM engine for tests: its own loop in a thread, and calls that wait for what they started.

Needs vLLM's CPU or GPU build in the interpreter that runs the tests; `make test-vllm` makes one. The model is the
random one-layer Llama of the bench, so that an engine is up in half a minute and a step takes under a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from evap.config import EngineConfig
from evap.engine.interface import Replica
from evap.messages import (
    FINISH_MASK,
    META,
    NO_TOKEN,
    SILENT,
    Finish,
    GenerateRequest,
    ReplicaState,
    SamplingParams,
    TokenBatch,
    TokenLogprobs,
)
from tests.support import Server

T = TypeVar("T")
VOCAB = 2048

#: vLLM and what it imports warn about themselves; that is not ours to fix
NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make test-vllm)"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),  # a start of an engine may be in it, on a machine that others use too
]


@dataclass
class Result:
    """What came of one generation, checked for order and completeness as it came."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    silent: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached: int | None = None
    prompt: Sequence[TokenLogprobs | None] | None = None
    problems: list[str] = field(default_factory=list)
    ended_at: int = 0  # number of the batch that brought its end


class Live:
    """A started replica. All methods may be called from the test's thread. loop: one that runs, for several on one."""

    def __init__(self, make: Callable[[], Replica], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.states: list[tuple[ReplicaState, str]] = []
        self.largest_batch = 0
        self.batches = 0
        self._results: dict[tuple[int, int], Result] = {}
        self._generation = 0
        self._changed = threading.Condition()
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="live engine", daemon=True)
        if loop is None:
            self._thread.start()
        self.replica: Any = self.do(make)
        self.do(lambda: self.replica.listen(self._on_batch, self._on_state))

    def start(self) -> Live:
        self.await_(self.replica.start())
        return self

    def do(self, call: Callable[[], T]) -> T:
        """Run on the engine's loop."""

        async def run() -> T:
            return call()

        return self.await_(run())

    def await_(self, work: Coroutine[Any, Any, T], timeout_s: float = 900.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.await_(self.replica.stop(), 120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # Generations

    def submit(self, requests: Sequence[GenerateRequest], first_slot: int = 0) -> list[tuple[int, int]]:
        """Submit all in one pass of the loop. Returns their (slot, generation)."""
        self._generation = (self._generation + 1) % 60_000
        keys = [(first_slot + n, self._generation) for n in range(len(requests))]
        with self._changed:
            for key in keys:
                self._results[key] = Result()

        def go() -> None:
            for key, request in zip(keys, requests, strict=True):
                self.replica.submit(*key, request)

        self.do(go)
        return keys

    def cancel(self, key: tuple[int, int]) -> None:
        self.do(lambda: self.replica.cancel(*key))

    def wait(self, keys: Sequence[tuple[int, int]], until: Callable[[Result], bool], timeout_s: float = 300.0) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(until(self._results[key]) for key in keys), timeout_s):
                raise AssertionError(f"waited {timeout_s} s: {[self._results[key] for key in keys][:4]}")

    def results(self, keys: Sequence[tuple[int, int]], timeout_s: float = 300.0) -> list[Result]:
        """Wait for the ends of all, and check that nothing was out of order."""
        self.wait(keys, lambda r: r.finish is not Finish.NONE, timeout_s)
        found = [self._results.pop(key) for key in keys]
        assert not [problem for result in found for problem in result.problems]
        return found

    def ended(self, key: tuple[int, int]) -> bool:
        with self._changed:
            return self._results[key].finish is not Finish.NONE

    def generate(self, *requests: GenerateRequest) -> list[Result]:
        return self.results(self.submit(requests))

    def _on_state(self, state: ReplicaState, line: str) -> None:
        self.states.append((state, line))

    def _on_batch(self, batch: TokenBatch) -> None:
        with self._changed:
            self.batches += 1
            self.largest_batch = max(self.largest_batch, len(batch))
            for n in range(len(batch)):
                self._record(batch, n)
            self._changed.notify_all()

    def _record(self, batch: TokenBatch, n: int) -> None:
        key = int(batch.slot[n]), int(batch.generation[n])
        result = self._results.get(key)
        if result is None:
            return
        flags, index = int(batch.flags[n]), int(batch.index[n])
        if result.finish is not Finish.NONE:
            result.problems.append(f"a record after the end: {key}")
        if flags & META:
            if result.cached is not None or result.tokens:
                result.problems.append("META twice, or after a token")
            result.cached, result.prompt = int(batch.token[n]), batch.prompt_logprobs.get(n)
            return
        if index != len(result.tokens):
            result.problems.append(f"index {index} after {len(result.tokens)} tokens")
        if not flags & NO_TOKEN:
            result.tokens.append(int(batch.token[n]))
        if n in batch.logprobs:
            result.logprobs.append(batch.logprobs[n])
        result.finish = Finish(flags & FINISH_MASK)
        result.ended_at = self.batches
        result.silent = bool(flags & SILENT)


def prepare_environment() -> None:
    """One thread and no pinning: the tests share the machine."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def config(**options: Any) -> EngineConfig:
    """A small engine: KV cache of 64 MB, 2,048 tokens of context."""
    given = {"engine": "vllm", "enforce_eager": True, "max_model_len": 2048, "max_running": 64, "kv_cache_mb": 64}
    return EngineConfig(**{**given, **options})


@contextlib.contextmanager
def engine(model: Path, before: Callable[[Any], None] = lambda _replica: None, **options: Any) -> Iterator[Live]:
    """A live engine with `options` of EngineConfig. `before` may change the replica before it starts."""
    from evap.engine import vllm

    prepare_environment()
    live = Live(lambda: vllm.build(config(**options), model))
    try:
        before(live.replica)
        yield live.start()
    finally:
        live.close()


def ask(prompt: Sequence[int] = (5, 6, 7), *, n: int = 8, **fields: Any) -> GenerateRequest:
    """A greedy request that does not stop early, unless told otherwise."""
    outer = {k: fields.pop(k) for k in ("priority", "cache_salt", "adapter") if k in fields}
    sampling = SamplingParams(**{"max_tokens": n, "temperature": 0.0, "ignore_eos": True, **fields})
    return GenerateRequest(prompt_ids=list(prompt), sampling=sampling, **outer)


def serve(*args: str) -> Iterator[Server]:
    """evap with vLLM behind it, as a process of its own; it must end well."""
    prepare_environment()
    server = Server("--engine", "vllm", "--port", "0", "--enforce-eager", *args)
    try:
        server.wait_ready(600)
        yield server
        assert server.stop(120) == 0, server.log
        server.check_log()
    finally:
        server.kill()
