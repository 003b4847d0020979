"""Runs in the engine core's process: vLLM's schedulers, which also say how much of the KV cache generations hold, how
many steps have ended, and since when one is being computed.

A few stores in shared memory a step, and one after an abort (which frees blocks between steps): vLLM's own way, its
statistics on each message, costs evap's process a decoded object for every step. The share is vLLM's: cached blocks
that nobody uses are free.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from evap.engine.meter import map_file
from evap.engine.vllm.shared import CONFIG_KEY, USAGE_ONE, Word
from evap.errors import OutdatedError


class Telling:
    """Mixed in before a scheduler of vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config.get(CONFIG_KEY)  # type: ignore[attr-defined]
        memory: Any = bytearray(8 * len(Word))
        if settings:
            try:
                memory = map_file(settings["usage"])
            except KeyError as error:
                raise OutdatedError(error) from error
        self._evap_words = memoryview(memory).cast("Q")
        self._evap_open = 0  # steps that are being computed: two where one is scheduled ahead

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if not self._evap_open:
            self._evap_words[Word.STEP_SINCE_NS] = time.monotonic_ns()
        self._evap_open += 1
        return scheduled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._evap_open = max(0, self._evap_open - 1)
        self._evap_words[Word.STEP_SINCE_NS] = time.monotonic_ns() if self._evap_open else 0
        self._evap_words[Word.STEPS] += 1
        self._evap_tell()
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        self._evap_tell()
        return ended

    def _evap_tell(self) -> None:
        self._evap_words[Word.KV_USAGE] = int(self.kv_cache_manager.usage * USAGE_ONE)  # type: ignore[attr-defined]


class TellingScheduler(Telling, Scheduler):  # type: ignore[misc]
    """For engines that schedule synchronously."""


class AsyncTellingScheduler(Telling, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule a step ahead."""
