"""The engine's step: admit, compute, publish. Joins scheduler, model and sampler; no I/O, no clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from evap.engine.meter import SharedMeter, Spec, StepMeter
from evap.engine.torch.cache import BlockPool
from evap.engine.torch.config import ModelConfig
from evap.engine.torch.load import BLOCK_SIZE, Loaded, is_out_of_memory
from evap.engine.torch.pacer import Pacer
from evap.engine.torch.plan import Lane, Planner, order
from evap.engine.torch.records import Records
from evap.engine.torch.rope import length_variant
from evap.engine.torch.sampler import Row, sample
from evap.engine.torch.scheduler import Scheduler, Seq, Work
from evap.engine.torch.wire import LogprobEntry
from evap.messages import (
    HAS_LOGPROBS,
    META,
    NO_TOKEN,
    SILENT,
    EngineInfo,
    Finish,
    GenerateRequest,
    SamplingParams,
    TokenLogprobs,
)


class Engine:
    """Requests in, records out. Not thread-safe; `step` is where the time goes."""

    def __init__(self, loaded: Loaded, *, max_running: int, prefill_chunk: int) -> None:
        config = loaded.config
        self._loaded = loaded
        self._dynamic = config.rope.rope_type == "dynamic"
        self.scheduler = Scheduler(
            BlockPool(loaded.blocks, BLOCK_SIZE),
            max_running=max_running,
            budget=prefill_chunk,
            max_len=loaded.max_len,
            cost_context=_cost_context(config),
            variant=lambda prompt_len, position: length_variant(config.rope, prompt_len, position),
        )
        self._pacer = Pacer(prefill_chunk)
        self._planner = Planner(BLOCK_SIZE, loaded.device, loaded.dtype)
        self._seqs: dict[tuple[int, int], Seq] = {}
        self._rows: dict[Seq, Row] = {}
        self._outbox = Records()
        self.meter: StepMeter | SharedMeter = StepMeter()
        self.steps = 0

    @property
    def info(self) -> EngineInfo:
        loaded = self._loaded
        return EngineInfo(
            engine="torch",
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            max_model_len=loaded.max_len,
            vocab_size=loaded.config.vocab_size,
            max_running=self.scheduler.max_running,
            kv_tokens=loaded.blocks * BLOCK_SIZE,
            version=str(torch.__version__),
        )

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing to publish."""
        return self.scheduler.idle and not len(self._outbox)

    @property
    def bound(self) -> int:
        """Most records that the next `step` computes: a META and a token for each that runs."""
        return 2 * self.scheduler.max_running

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that generations hold; what is kept for later ones is free (as vLLM counts it)."""
        pool = self.scheduler.pool
        return 1.0 - pool.free / pool.count

    def beats(self, beat: Callable[[], None]) -> None:
        """Call `beat` after each layer that was computed (on a GPU: given to it, which waits when it is far behind)."""
        self._loaded.model.beat = beat

    def warm_up(self) -> None:
        """Run a prefill and a few decoding steps: the first of each shape prepares kernels."""
        for rows in (1, 4):
            for slot in range(rows):
                prompt = [slot + 1] * min(8, self._loaded.max_len - 1)
                sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
                self.submit(slot, 0, GenerateRequest(prompt_ids=prompt, sampling=sampling))
            while not self.idle:
                self.step()
        self.steps = 0

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None:
        """Queue a request; one that this engine cannot run ends in Finish.ERROR with the next step."""
        ids, sampling, vocab = request.prompt_ids, request.sampling, self._loaded.config.vocab_size
        fits = 0 < len(ids) < self._loaded.max_len and min(ids) >= 0 and max(ids) < vocab
        if not fits or any(not 0 <= i < vocab for i in (*sampling.stop_token_ids, *sampling.logit_bias)):
            self._outbox.add(slot, generation, 0, 0, Finish.ERROR | NO_TOKEN)
            return
        self._seqs[slot, generation] = self.scheduler.add(slot, generation, request, self._loaded.config.eos_ids)

    def attach(self, base: int, meter: Spec | None) -> None:
        """Another process submits from now on, with `base` added to its slots, and has this page for them."""
        if isinstance(self.meter, SharedMeter):
            self.meter.attach(base, meter)

    def detach(self, base: int) -> None:
        """It is gone."""
        if isinstance(self.meter, SharedMeter):
            self.meter.detach(base)

    def cancel(self, slot: int, generation: int) -> None:
        """End a request between two steps; unknown ones are ignored."""
        seq = self._seqs.get((slot, generation))
        if seq is not None:
            self._abandon(seq, Finish.CANCELLED)

    def step(self) -> Records:
        """Compute one step and return all that is to be published. Raises what torch raises: see `relieve`."""
        work, admitted = self.scheduler.schedule()
        for seq in admitted:
            self._outbox.add(seq.slot, seq.generation, seq.cached, 0, META | NO_TOKEN)
            self._rows[seq] = self._row(seq)
        if work:
            self.meter.begin([self._meter_entry(seq) for seq in admitted])
            work, hidden = self._forward(work)
            tokens, logprobs = self._sample(work, hidden)
            self.meter.step([item.seq.slot for item in work], tokens, [item.last for item in work])
            self._publish(work, tokens, logprobs)
            self.steps += 1
        records, self._outbox = self._outbox, Records()
        return records

    def pace(self, elapsed_ns: int) -> None:
        """The last step took so long: choose how much prefill the next may hold."""
        if self.scheduler.cost > self.scheduler.budget / 2:
            self._pacer.took(self.scheduler.cost, elapsed_ns)
            self.scheduler.budget = self._pacer.budget

    @staticmethod
    def is_out_of_memory(error: Exception) -> bool:
        return is_out_of_memory(error)

    def relieve(self) -> None:
        """After an out-of-memory in `step`: give up the request that takes most of it. The others lose nothing."""
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.scheduler.running:
            self._abandon(max(self.scheduler.running, key=lambda seq: len(seq.tokens)), Finish.ERROR)

    @torch.inference_mode()
    def _forward(self, work: Sequence[Work]) -> tuple[list[Work], torch.Tensor]:
        """The work in the order in which it was computed, and what the head sees of those that are `last` in it."""
        loaded = self._loaded
        lanes = [Lane(item.seq.blocks, item.start, item.count) for item in work]
        by = order(lanes)
        work = [work[i] for i in by]
        ids: list[int] = []
        ends: list[int] = []
        for item in work:
            ids += item.seq.tokens[item.start : item.start + item.count]
            if item.last:
                ends.append(len(ids) - 1)
        hidden = loaded.model.hidden(
            torch.tensor(ids, device=loaded.device),
            self._planner.plan([lanes[i] for i in by]),
            self._variants(work) if self._dynamic else (),
            None if len(ends) == len(ids) else torch.tensor(ends, dtype=torch.int64, device=loaded.device),
        )
        return work, hidden

    def _variants(self, work: Sequence[Work]) -> list[int]:
        rope = self._loaded.config.rope
        return [
            length_variant(rope, item.seq.prompt_len, position)
            for item in work
            for position in range(item.start, item.start + item.count)
        ]

    @torch.inference_mode()
    def _sample(self, work: Sequence[Work], hidden: torch.Tensor) -> tuple[list[int], list[TokenLogprobs | None]]:
        """A token and log probabilities for each item of work (0 and None unless `last`)."""
        last = [item.seq for item in work if item.last]
        if not last:
            return [0] * len(work), [None] * len(work)
        outputs = [seq.tokens[seq.prompt_len :] for seq in last]
        model = self._loaded.model
        rows = [self._rows[seq] for seq in last]
        tokens, logprobs = sample(model.logits(hidden), rows, outputs, model.decider(hidden))
        pairs = iter(zip(tokens, logprobs, strict=True))
        both = [next(pairs) if item.last else (0, None) for item in work]
        return [token for token, _ in both], [entry for _, entry in both]

    def _publish(self, work: Sequence[Work], tokens: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        finishes = self.scheduler.commit(work, tokens)
        for item, token, entry, finish in zip(work, tokens, logprobs, finishes, strict=True):
            if not item.last:
                continue
            seq, flags = item.seq, int(finish)
            index = seq.generated - 1
            if finish is Finish.STOP:
                flags |= SILENT
            if entry is not None:
                flags |= HAS_LOGPROBS
                self._outbox.logprobs.append(LogprobEntry(seq.slot, seq.generation, index, entry))
            self._outbox.add(seq.slot, seq.generation, token, index, flags)
            if finish is not Finish.NONE:
                self._forget(seq)

    def _abandon(self, seq: Seq, finish: Finish) -> None:
        self.scheduler.end(seq)
        self._outbox.add(seq.slot, seq.generation, 0, seq.generated, finish | NO_TOKEN)
        self._forget(seq)

    def _forget(self, seq: Seq) -> None:
        del self._seqs[seq.slot, seq.generation]
        self._rows.pop(seq, None)

    @staticmethod
    def _meter_entry(seq: Seq) -> tuple[int, int, int, int, int, int]:
        most = seq.request.sampling.max_tokens
        return seq.slot, seq.generation, seq.prompt_len, seq.cached, most, -1  # it never samples beyond an end token

    def _row(self, seq: Seq) -> Row:
        sampling = seq.request.sampling
        seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(8), "little")
        return Row(
            sampling,
            prompt=seq.request.prompt_ids,
            stop_ids=seq.stop_ids,
            seed=seed,
            vocab=self._loaded.config.vocab_size,
            device=self._loaded.device,
        )


def _cost_context(config: ModelConfig) -> int:
    """The position whose attention costs as much arithmetic as all of a token's matrix products."""
    attention = config.heads * config.head_dim
    width = 2 * attention + 2 * config.kv_heads * config.head_dim + 3 * config.intermediate_size
    return max(1, config.hidden_size * width // (2 * attention))
