"""Runs in vLLM's worker process: counts what was sampled, right after sampling, where nobody can be late or wrong.

`Meter` is mixed into vLLM's worker. `evap_install` wraps two methods of the model runner: before a forward pass the
requests that take part for the first time are told to the meter, after the sampler the step's tokens. On a GPU that
is a kernel launch on the worker's own stream with ids that are on the device already; on the CPU build the same
kernel's host build, or numpy, counts the same.

Not counted: rows of a partial prefill (the sampler's token for them is thrown away) and drafts that speculative
decoding rejected. Counted once: the prompt of a request that was preempted and is computed again. Only the last
pipeline stage's first tensor-parallel rank meters. `computed` may exceed what the scheduler emits: an engine that
schedules ahead runs one step past a stop.

The meter itself belongs to evap's metering, which engines do not import: it is named in the settings.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from evap.engine.meter import open_writer, stream_of
from evap.engine.vllm import ids

Ints = npt.NDArray[np.int32]
SLOT_BITS: Final = 16
SLOT_MASK: Final = np.int32((1 << SLOT_BITS) - 1)


class Meter:
    """Mixed into vLLM's worker by `worker_extension_cls`; its names must not meet the worker's own."""

    _evap_counter: Counter | None = None

    def evap_install(self, settings: dict[str, Any]) -> bool:
        """Start metering into the page that `settings["meter"]` names. True in the worker that counts.

        Each process that uses the engine asks for its own page: `nonce` is that of its request ids, `client` its
        number, whose last page this replaces.
        """
        spec = settings.get("meter")
        if spec is None or not counts_here():
            return False
        runner = self.model_runner  # type: ignore[attr-defined]
        writer = open_writer(spec, str(runner.device.type), time.monotonic_ns, tensors=True)
        if writer is None:
            return False
        if self._evap_counter is None:
            self._evap_counter = Counter(importlib.import_module(spec["module"]).Join)
            self._evap_counter.stream = stream_of(writer)
            wrap(runner, self._evap_counter)
        self._evap_counter.add(settings["client"], settings["nonce"], writer)
        return True


def counts_here() -> bool:
    """Last pipeline stage, first of its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415  # needs a worker

    return bool(get_pp_group().is_last_rank) and get_tp_group().rank_in_group == 0


def wrap(runner: Any, counter: Counter) -> None:
    """Put the counter around a model runner's forward pass and sampler."""
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        counter.before(scheduler_output)
        return execute(scheduler_output, *args, **kwargs)

    def sample_tokens(grammar_output: Any) -> Any:
        output = sample(grammar_output)
        counter.after(output)
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


class Counter:
    """Turns the runner's batches into the meter's: slots for request ids, one array of tokens per step.

    Each process that uses the engine has a page (and a writer), and slots of its own: here they have the process's
    number above their 16 bits.
    """

    def __init__(self, join: Callable[..., Any]) -> None:
        self._join = join
        self._slots: dict[str, int] = {}  # request id -> slot, with the process's number
        self._writers: dict[int, Any] = {}
        self._clients: dict[str, int] = {}  # nonce of request ids -> number of the process
        self._only: Any = None  # the writer, if it is process 0's and the only one
        self.stream: Callable[[], Any] = contextlib.nullcontext

    def add(self, client: int, nonce: str, writer: Any) -> None:
        """A process's page. What its predecessor had asked for is not counted any more: nobody reads that page."""
        self._writers[client] = writer
        self._clients = {known: n for known, n in self._clients.items() if n != client} | {nonce: client}
        self._slots = {i: slot for i, slot in self._slots.items() if slot >> SLOT_BITS != client}
        self._only = writer if list(self._writers) == [0] else None

    def before(self, scheduler_output: Any) -> None:
        """New requests join; those that ended leave (a slot that is taken again joins with its new generation)."""
        for request_id in scheduler_output.finished_req_ids:
            self._slots.pop(request_id, None)
        joins: dict[int, list[Any]] = {client: [] for client in self._writers}
        for request in scheduler_output.scheduled_new_reqs:
            client = self._clients.get(ids.nonce_of(request.req_id))
            if client is not None and request.sampling_params is not None:  # else: a warm-up, or nobody's any more
                join = self._new(request, client)
                if join is not None:
                    joins[client].append(join)
        with self.stream():
            for client, writer in self._writers.items():
                writer.begin(joins[client], time.monotonic_ns())

    def _new(self, request: Any, client: int) -> Any:
        where = ids.parse(request.req_id)
        if where is None or request.req_id in self._slots:
            return None  # preempted, and computed again: its prompt is counted once
        slot, generation = where
        self._slots[request.req_id] = client << SLOT_BITS | slot
        params = request.sampling_params
        eos = params.eos_token_id
        return self._join(
            slot=slot, generation=generation, prompt=len(request.prompt_token_ids or ()),
            cached=request.num_computed_tokens, limit=params.max_tokens, eos=-1 if eos is None else eos,
        )  # fmt: skip

    def after(self, output: Any) -> None:
        """What the sampler gave: lists of kept tokens; from an engine that schedules ahead, a tensor on its device."""
        ahead = getattr(output, "_model_runner_output", None)
        if ahead is not None:
            self._tensor(ahead.req_ids, output._sampled_token_ids, output._invalid_req_indices)
        elif getattr(output, "sampled_token_ids", None):
            self._lists(output.req_ids, output.sampled_token_ids)

    def _of(self, req_ids: Sequence[str]) -> Ints:
        return np.array([self._slots.get(i, -1) for i in req_ids], np.int32)

    def _lists(self, req_ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        counts = np.array([len(tokens) for tokens in sampled], np.int32)
        table = np.zeros((len(sampled), max(1, int(counts.max(initial=0)))), np.int32)
        for row, tokens in enumerate(sampled):
            table[row, : len(tokens)] = tokens
        self._step(self._of(req_ids), table, counts)

    def _tensor(self, req_ids: Sequence[str], tokens: Any, discarded: Sequence[int]) -> None:
        slots = self._of(req_ids)
        slots[list(discarded)] = -1
        tokens = tokens[: len(slots)]
        counts = (tokens >= 0).sum(-1)  # a rejected draft is -1; no copy to the host
        if tokens.device.type == "cpu":
            tokens, counts = tokens.numpy(), counts.numpy().astype(np.int32)
        self._step(slots, tokens, counts)

    def _step(self, slots: Ints, tokens: Any, counts: Any) -> None:
        with self.stream():
            if self._only is not None:
                self._only.step(slots, tokens, counts, time.monotonic_ns(), ring=False)
                return
            clients = slots >> SLOT_BITS
            for client, writer in self._writers.items():
                mine = clients == client
                if mine.any():
                    own = np.where(mine, slots & SLOT_MASK, np.int32(-1))
                    writer.step(own, tokens, counts, time.monotonic_ns(), ring=False)
