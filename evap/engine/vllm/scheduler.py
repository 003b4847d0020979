"""Runs in the engine core's process: final tokens go straight into evap's ring (`--token-path scheduler`).

In `update_from_output` the outputs of a step are final: after end-of-sequence, stop ids, max_tokens, speculative
acceptance and preemption; partial prefills have none. Their tokens are written as (slot, generation, token) records,
the doorbell is rung once, and the outputs are taken off the message, so that most steps send no message at all.

Stays on the message: log probabilities, and every request from its first step for which the ring had no room (the
engine never waits). One message per request remains: at its end, with the engine's own account of the request (count
and fingerprint of *its* list of output tokens), against which evap's process compares what came off the ring.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from evap.engine.meter import map_file
from evap.engine.vllm import ids
from evap.engine.vllm.rows import ACCOUNT_KEY, FINISHES
from evap.engine.vllm.shared import BELL_FILE, CONFIG_KEY, RING_FILE, Bell, fingerprint
from evap.engine.vllm.usage import Telling
from evap.errors import OutdatedError
from evap.messages import META, NO_TOKEN, SILENT, Finish
from evap.ring import RingWriter

_STOP: Final = 0


class Way:
    """The ring of one process of evap's, in its directory. nonce: of its requests' ids. Raises OSError."""

    def __init__(self, folder: str, capacity: int, nonce: str) -> None:
        self.nonce = nonce
        self.bell = Bell(f"{folder}/{BELL_FILE}")
        self.writer = RingWriter(map_file(f"{folder}/{RING_FILE}"), capacity)

    def close(self) -> None:
        self.writer.close()
        self.bell.close()


class _Known:
    """A request that has had output."""

    __slots__ = ("count", "generation", "request", "slot", "way")

    def __init__(self, request: Any, where: tuple[int, int], way: Way) -> None:
        self.request = request
        self.way = way
        self.count = 0
        self.slot, self.generation = where


class RingPath:
    """What happens to a step's outputs. Holds only requests that have had output and have not ended.

    Where several processes use the engine, each has a directory of its own, which it makes before its first request.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        try:
            self._folder, self._capacity = settings["folder"], settings["capacity"]
            self._only = None if settings["many"] else Way(self._folder, self._capacity, "")
        except (KeyError, ValueError) as error:
            raise OutdatedError(error) from error
        self._ways: dict[int, Way | None] = {}  # number of the process -> its last one's; None: it cannot be opened
        self._nonces: dict[int, str] = {}
        self._known: dict[str, _Known] = {}
        self._by_message: set[str] = set()  # requests whose tokens travel by message until they end
        self._step = 0

    def take(self, outputs: dict[int, Any], requests: dict[str, Any]) -> dict[int, Any]:
        """Move what can be moved from the messages into the ring. `requests`: the scheduler's, as before the step."""
        self._step += 1
        for client in list(outputs):
            message = outputs[client]
            way = self._way(client, message.outputs) if message.outputs else None
            if way is not None:
                message.outputs = self._through(way, message.outputs, requests)
            if not message.outputs and message.scheduler_stats is None and message.utility_output is None:
                del outputs[client]
        return outputs

    def _way(self, client: int, outputs: list[Any]) -> Way | None:
        """The ring of the process with this number: another one's once it has been started again."""
        if self._only is not None:
            return self._only
        nonce = ids.nonce_of(outputs[-1].request_id)
        if nonce != self._nonces.get(client):
            self._nonces[client] = nonce
            old = self._ways.pop(client, None)
            if old is not None:
                old.close()
            try:
                self._ways[client] = Way(f"{self._folder}/{nonce}", self._capacity, nonce)
            except (OSError, ValueError):  # gone already, and about to be aborted; or of another version
                self._ways[client] = None
        return self._ways[client]

    def _through(self, way: Way, outputs: list[Any], requests: dict[str, Any]) -> list[Any]:
        """Into the ring what it has room for; the outputs that are left for the message."""
        columns: tuple[list[int], ...] = ([], [], [], [], [])
        kept = self._filter(way, outputs, requests, columns)
        if columns[0]:
            slot, generation, token, index, flags = columns
            way.writer.write(slot, generation, token, index, flags, self._step)
            way.bell.ring()
        return kept

    def forget(self, request_id: str) -> None:
        """It was aborted."""
        self._known.pop(request_id, None)
        self._by_message.discard(request_id)

    def _filter(
        self, way: Way, outputs: list[Any], requests: dict[str, Any], columns: tuple[list[int], ...]
    ) -> list[Any]:
        room = way.writer.room()
        kept: list[Any] = []
        for output in outputs:
            needed = len(output.new_token_ids) + 2  # META and a final record, at most
            if output.request_id in self._by_message or not self._fits(way, output, requests, needed <= room):
                kept.append(output)
                if output.finish_reason is not None:
                    self.forget(output.request_id)
                continue
            room -= self._records(output, columns)
            if output.finish_reason is not None:
                kept.append(self._account(output))
        return kept

    def _fits(self, way: Way, output: Any, requests: dict[str, Any], room: bool) -> bool:
        """Whether this request's tokens go through the ring; once they do not, they do not until its end."""
        known = self._known.get(output.request_id)
        if known is None:
            request = requests.get(output.request_id)
            where = ids.parse(output.request_id)
            if request is None or where is None:  # it never ran (an error before its first token)
                return False
            known = self._known[output.request_id] = _Known(request, where, way)
            room &= way.nonce in ("", ids.nonce_of(output.request_id))  # else: a process's that is gone
        if room and known.way is way and output.new_logprobs is None and output.new_prompt_logprobs_tensors is None:
            return True
        self._by_message.add(output.request_id)
        return False

    def _records(self, output: Any, columns: tuple[list[int], ...]) -> int:
        known = self._known[output.request_id]
        before = len(columns[0])
        if output.prefill_stats is not None:
            _append(columns, known, output.prefill_stats.num_cached_tokens, 0, META)
        reason = output.finish_reason
        finish = FINISHES.get(int(reason), Finish.ERROR) if reason is not None else Finish.NONE
        tokens = output.new_token_ids
        for n, token in enumerate(tokens, 1):
            final = int(finish) | (SILENT if reason is not None and int(reason) == _STOP else 0)
            _append(columns, known, token, known.count, final if n == len(tokens) else 0)
            known.count += 1
        if not tokens and finish is not Finish.NONE:
            _append(columns, known, 0, known.count, int(finish) | NO_TOKEN)
        return len(columns[0]) - before

    def _account(self, output: Any) -> Any:
        """The last message of a request: no tokens, but what the engine itself counts."""
        known = self._known.pop(output.request_id)
        own = list(known.request.output_token_ids)
        output.new_token_ids = []
        output.trace_headers = {ACCOUNT_KEY: f"{len(own)}:{fingerprint(own)}"}
        output.prefill_stats = None
        return output


def _append(columns: tuple[list[int], ...], known: _Known, token: int, index: int, flags: int) -> None:
    for column, value in zip(columns, (known.slot, known.generation, token, index, flags), strict=True):
        column.append(value)


class _OnRing(Telling):
    """Mixed in before a scheduler of vLLM's."""

    _evap: RingPath | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config.get(CONFIG_KEY)  # type: ignore[attr-defined]
        self._evap = RingPath(settings) if settings else None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._evap is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        # vLLM drops a request that ends from its table, but its object stays whole: keep a hold of the step's requests.
        running = self.requests  # type: ignore[attr-defined]
        requests = {i: running[i] for i in scheduler_output.num_scheduled_tokens if i in running}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        return self._evap.take(outputs, requests)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        ended = super().finish_requests(request_ids, finished_status)
        if self._evap is not None:
            for request in ended:
                if finished_status.name == "FINISHED_ABORTED":
                    self._evap.forget(request.request_id)
        return ended


class RingScheduler(_OnRing, Scheduler):  # type: ignore[misc]
    """For engines that schedule synchronously."""


class AsyncRingScheduler(_OnRing, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule a step ahead."""
