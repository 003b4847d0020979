"""Seam "async-llm": vLLM's own AsyncLLM, for releases that the core client does not fit. Dearer: a task, a queue and an
output object per request and step. What the tasks yield in one pass of the loop is reported as one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from evap.engine.vllm import names
from evap.engine.vllm.client import Sink
from evap.engine.vllm.rows import Step
from evap.engine.vllm.runs import Row
from evap.messages import Finish, TokenLogprobs, TopLogprob

logger = logging.getLogger(__name__)

FINISHES: Final = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.CANCELLED, "repetition": Finish.STOP}


class LlmSeam:
    def __init__(self, vllm_config: Any, sink: Sink) -> None:
        self._config = vllm_config
        self._sink: Sink | None = sink
        self._loop = asyncio.get_running_loop()
        self._llm: Any = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rows: list[Row] = []
        self._watch: asyncio.Task[None] | None = None

    async def open(self, spawned: Callable[[], None]) -> None:
        # AsyncLLM makes its client inside its constructor, which blocks until the engine is up.
        self._llm = await asyncio.to_thread(names.AsyncLLM.from_vllm_config, self._config, disable_log_stats=True)
        spawned()
        self._watch = self._loop.create_task(self._watch_health())

    def pids(self) -> list[int]:
        manager = self._llm.engine_core.resources.engine_manager if self._llm is not None else None
        return [process.pid for process in manager.processes] if manager is not None else []

    def add(self, request: Any) -> None:
        own_id = request.request_id  # AsyncLLM appends to it
        task = self._tasks[own_id] = self._loop.create_task(self._generate(request, own_id))
        task.add_done_callback(lambda ended: self._ended(own_id, ended))  # a task cancelled at once never runs a line

    def abort(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()  # AsyncLLM aborts the request when its generator is closed

    def call(self, method: str, *args: object) -> Awaitable[Any]:
        result: Awaitable[Any] = self._llm.engine_core.call_utility_async(method, *args)
        return result

    async def _generate(self, request: Any, own_id: str) -> None:
        async for output in self._llm.generate(request, request.sampling_params, own_id):
            self._report(self._row(own_id, output))

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(request_id, None)
        if self._sink is None:
            return
        self._flush()
        if task.cancelled():
            self._sink.on_aborted([request_id])
        elif task.exception() is not None and not self._llm.errored:  # a dead engine is noticed by the watch
            logger.error("a request failed in AsyncLLM", exc_info=task.exception())
            self._report(Row(request_id=request_id, finish=Finish.ERROR))

    def _row(self, request_id: str, output: Any) -> Row:
        choice = output.outputs[0]
        reason = choice.finish_reason
        return Row(
            request_id=request_id,
            tokens=list(choice.token_ids),
            finish=FINISHES.get(reason, Finish.ERROR) if reason is not None else Finish.NONE,
            silent=reason == "stop",
            logprobs=_positions(choice.logprobs, choice.token_ids) if choice.logprobs is not None else None,
            cached=output.num_cached_tokens,
            prompt_logprobs=_prompt(output.prompt_logprobs, output.prompt_token_ids),
        )

    def _report(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows and self._sink is not None:
            self._sink.on_step(Step(rows=rows))

    async def _watch_health(self) -> None:
        """AsyncLLM has no callback for a death of its engine; its monitor sets a flag."""
        while not self._llm.errored:  # noqa: ASYNC110  # there is nothing to wait on
            await asyncio.sleep(0.1)
        self._flush()
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.on_death("the engine's process ended")

    async def close(self, timeout_s: float) -> None:
        self._sink = None
        tasks: list[asyncio.Task[None]] = [*self._tasks.values(), *([self._watch] if self._watch is not None else [])]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown, timeout=timeout_s)
            await asyncio.sleep(0)  # vLLM closes its sockets in the next pass of the loop
            self._llm.engine_core.resources.ctx.destroy(linger=0)


def _positions(found: Sequence[Any], tokens: Sequence[int]) -> list[TokenLogprobs]:
    """AsyncLLM's list of {token id: Logprob}, in which the sampled token comes first and ranks order the others."""
    return [_position(entries, token) for entries, token in zip(found, tokens, strict=True)]


def _position(entries: Any, token: int) -> TokenLogprobs:
    """The token's own entry may or may not be among the best k: dictionaries fold the two together."""
    own = entries[token].logprob
    ranked = sorted(entries.items(), key=lambda item: item[1].rank)
    most = len(entries) - 1 if ranked[-1][0] == token and ranked[-1][1].rank > len(entries) - 1 else len(entries)
    return TokenLogprobs(logprob=own, top=tuple(TopLogprob(i, entry.logprob) for i, entry in ranked[:most]))


def _prompt(found: Any, prompt_ids: Sequence[int]) -> list[TokenLogprobs | None] | None:
    if not found:  # None, or (after the first output) nothing more
        return None
    return [None if e is None else _position(e, token) for e, token in zip(found, prompt_ids, strict=True)]
