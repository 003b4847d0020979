"""The engine on tiny models against transformers, and every way a request can go."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from evap.engine.meter import StepMeter
from evap.engine.torch.engine import Engine
from evap.messages import (
    FINISH_MASK,
    HAS_LOGPROBS,
    META,
    NO_TOKEN,
    SILENT,
    Finish,
    GenerateRequest,
    SamplingParams,
)
from evap.metering.counters import Counters
from tests.engine.torch.tiny import Maker, Outcome, generate, greedy, load_tiny, prompts, reference


def engine(make: Maker, *, max_running: int = 8, chunk: int = 512, **settings: Any) -> Engine:
    return Engine(load_tiny(make()[1], **settings), max_running=max_running, prefill_chunk=chunk)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("chunk", [512, 16])
def test_greedy_is_transformers_token_for_token(make: Maker, family: str, together: bool, chunk: int) -> None:
    model, path = make(family)
    it = Engine(load_tiny(path), max_running=8, prefill_chunk=chunk)
    asked = prompts(6)
    for _ in range(2):  # the second time out of the prefix cache
        outcome = generate(it, [(prompt, greedy()) for prompt in asked], together)
        for slot, prompt in enumerate(asked):
            assert outcome.tokens[slot] == reference(model, prompt), f"prompt {slot}"
        assert set(outcome.finish.values()) == {Finish.LENGTH}
    assert outcome.cached == {0: 0, 1: 16, 2: 32, 3: 48, 4: 96, 5: 0}


def test_preempted_requests_go_on_as_if_nothing_had_happened(make: Maker) -> None:
    model, path = make()
    loaded = load_tiny(path)
    small = Engine(loaded, max_running=8, prefill_chunk=64)
    # Six prompts of some 40 tokens that grow by 60 each, in room for four of them.
    small.scheduler.pool.allocate(loaded.blocks - 26)
    asked = prompts(6, lengths=(40,))
    outcome, preempted = Outcome(), False
    for slot, prompt in enumerate(asked):
        small.submit(slot, 1, GenerateRequest(prompt_ids=prompt, sampling=greedy(60)))
    while not small.idle:
        outcome.take(small.step())
        preempted = preempted or any(seq.generated for seq in small.scheduler.waiting)
    assert preempted
    assert outcome.tokens == {slot: reference(model, prompt, 60) for slot, prompt in enumerate(asked)}


def test_a_seed_gives_the_same_answer_alone_and_in_company(make: Maker) -> None:
    it = engine(make)
    asked = prompts(6)
    kinds: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {}, {"presence_penalty": 1.0}, {}]
    requests = [
        (prompt, SamplingParams(max_tokens=20, seed=slot, ignore_eos=True, **kind))
        for slot, (prompt, kind) in enumerate(zip(asked, kinds, strict=True))
    ]
    together = generate(it, requests).tokens
    assert together == generate(it, requests, together=False).tokens
    assert together != generate(it, [(p, SamplingParams(max_tokens=20, seed=9)) for p in asked]).tokens


def test_without_a_seed_the_engine_chooses_one(make: Maker) -> None:
    it = engine(make)
    prompt = prompts(1)[0]
    outcome = generate(it, [(prompt, SamplingParams(max_tokens=30, ignore_eos=True))] * 4)
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) == 4


def test_the_end_token_is_silent_and_counts(make: Maker) -> None:
    model, _ = make()
    prompt = prompts(1)[0]
    answer = reference(model, prompt)
    stop = answer[5]
    it = engine(make)
    it.submit(3, 7, GenerateRequest(prompt_ids=prompt, sampling=greedy(50, stop_token_ids=(stop,))))
    columns = []
    while not it.idle:
        records = it.step()
        columns += list(zip(records.token, records.index, records.flags, strict=True))
    first = answer.index(stop)
    assert columns[0] == (0, 0, META | NO_TOKEN)
    assert [token for token, _, _ in columns[1:]] == answer[: first + 1]
    assert [index for _, index, _ in columns[1:]] == list(range(first + 1))
    assert columns[-1][2] == Finish.STOP | SILENT
    assert not any(flags for _, _, flags in columns[1:-1])


def test_the_cache_is_held_while_something_runs_and_free_once_it_is_only_remembered(make: Maker) -> None:
    it = engine(make)
    assert it.kv_usage == 0
    it.submit(3, 7, GenerateRequest(prompt_ids=prompts(1, lengths=(40,))[0], sampling=greedy(30)))
    held = []
    while not it.idle:
        it.step()
        held.append(it.kv_usage)
    blocks = [round(share * it.scheduler.pool.count) for share in held]
    assert blocks[0] == 3, "40 tokens in blocks of 16"
    assert blocks[:-1] == sorted(blocks[:-1])
    assert blocks[-2:] == [5, 0]


def test_logprobs_come_with_their_records(make: Maker) -> None:
    it = engine(make)
    it.submit(3, 7, GenerateRequest(prompt_ids=[5, 6, 7], sampling=greedy(4, logprobs=2)))
    entries, flagged = [], []
    while not it.idle:
        records = it.step()
        entries += records.logprobs
        flagged += [index for index, flags in zip(records.index, records.flags, strict=True) if flags & HAS_LOGPROBS]
    assert [(e.slot, e.generation, e.index) for e in entries] == [(3, 7, i) for i in range(4)]
    assert flagged == [0, 1, 2, 3]
    assert all(e.logprobs.logprob == e.logprobs.top[0].logprob for e in entries)


def test_cancel_in_the_queue_in_a_prefill_and_while_decoding(make: Maker) -> None:
    it = engine(make, max_running=2, chunk=16)
    free = it.scheduler.pool.free
    for slot, prompt in enumerate(([5] * 3, [6] * 200, [7] * 4)):
        it.submit(slot, 1, GenerateRequest(prompt_ids=prompt, sampling=greedy(50)))
    it.step()
    it.step()
    for slot in range(3):
        it.cancel(slot, 2)  # another generation
        it.cancel(slot, 1)
        it.cancel(slot, 1)
    records = it.step()
    assert [(slot, flags & FINISH_MASK) for slot, flags in zip(records.slot, records.flags, strict=True)] == [
        (slot, Finish.CANCELLED) for slot in range(3)
    ]
    assert it.idle
    assert it.scheduler.pool.free == free


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([], greedy()),
        ([5] * 256, greedy()),
        ([5, 128], greedy()),
        ([-1], greedy()),
        ([5], greedy(logit_bias={128: 1.0})),
        ([5], greedy(stop_token_ids=(-1,))),
    ],
)
def test_what_would_hurt_it_is_refused_alone(make: Maker, prompt: list[int], sampling: SamplingParams) -> None:
    outcome = generate(engine(make), [([5, 6], greedy(2)), (prompt, sampling)])
    assert outcome.finish == {0: Finish.LENGTH, 1: Finish.ERROR}


def test_out_of_memory_is_recognised_and_costs_the_largest_request(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = engine(make)
    for slot, length in enumerate((5, 200, 9)):
        it.submit(slot, 1, GenerateRequest(prompt_ids=[5] * length, sampling=greedy(3)))
    outcome = Outcome()
    with monkeypatch.context() as patch:
        patch.setattr(it._loaded.model, "hidden", lambda *args: torch.empty(1 << 60))
        with pytest.raises(RuntimeError) as caught:
            it.step()
    assert it.is_out_of_memory(caught.value)
    assert it.is_out_of_memory(MemoryError())
    assert not it.is_out_of_memory(RuntimeError("a bug"))
    it.relieve()
    while not it.idle:
        outcome.take(it.step())
    assert outcome.finish == {0: Finish.LENGTH, 1: Finish.ERROR, 2: Finish.LENGTH}
    assert outcome.cached.keys() == {0, 1, 2}


def test_a_step_never_publishes_more_than_it_said(make: Maker) -> None:
    it = engine(make, max_running=3)
    for slot, prompt in enumerate(prompts(9)):
        it.submit(slot, 1, GenerateRequest(prompt_ids=prompt, sampling=greedy(5)))
        it.cancel(slot - 4, 1)
    while not it.idle:
        bound = it.bound + len(it._outbox)
        assert len(it.step()) <= bound


def test_slow_steps_shrink_the_prefill_chunk(make: Maker) -> None:
    it = engine(make, chunk=128)
    it.submit(1, 1, GenerateRequest(prompt_ids=[5] * 250, sampling=greedy(9)))
    it.step()
    it.pace(1_000_000_000)
    assert it.scheduler.budget < 128
    before = it.scheduler.budget
    while not it.idle:
        it.step()
        it.pace(1)  # a prefill that is quick, then steps that say nothing about prefill
    assert before < it.scheduler.budget <= 128
    it.pace(1_000_000_000)
    assert it.scheduler.budget > 64


def test_dynamic_positions_do_not_depend_on_chunks_or_on_the_cache(make: Maker) -> None:
    _, path = make(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0})
    asked = [(prompt, greedy(60)) for prompt in prompts(3, lengths=(250, 480, 600))]  # trained context: 256
    answers = []
    for chunk in (1024, 48):
        it = Engine(load_tiny(path, max_model_len=1000), max_running=4, prefill_chunk=chunk)
        for _ in range(2):
            outcome = generate(it, asked)
            answers.append(outcome.tokens)
    assert answers == [answers[0]] * 4
    assert outcome.cached == {0: 240, 1: 464, 2: 592}


def test_warming_up_leaves_no_trace(make: Maker) -> None:
    it = engine(make)
    free = it.scheduler.pool.free
    it.warm_up()
    assert (it.steps, it.idle, it.scheduler.pool.free) == (0, True, free)
    assert it.info.vocab_size == 128
    assert it.info.kv_tokens >= 4096


def test_the_counters_page_has_what_the_engine_gave(make: Maker) -> None:
    """Chunked prefill, cached prefixes, preemption, cancels: a row each, to the token."""
    loaded = load_tiny(make()[1])
    it = Engine(loaded, max_running=8, prefill_chunk=16)
    it.scheduler.pool.allocate(loaded.blocks - 26)
    pages = Counters(64, 1, None, ahead=False, now_ns=0, unix_ns=0)
    it.meter = StepMeter(pages.specs[0], now_ns=itertools.count(1_000_000, 1_000_000).__next__)
    outcome, asked = Outcome(), prompts(6, lengths=(40,))
    for turn in range(2):  # the second time out of the prefix cache
        it.submit(8 * turn + 6, turn, GenerateRequest(prompt_ids=[5, 6], sampling=greedy(1000 if not turn else 3)))
        for n, prompt in enumerate(asked):
            it.submit(8 * turn + n, turn, GenerateRequest(prompt_ids=prompt, sampling=greedy(60)))
        for _ in range(20):
            outcome.take(it.step())
        it.cancel(6, 0)
        while not it.idle:
            outcome.take(it.step())
    assert outcome.finish[6] is Finish.CANCELLED
    assert any(outcome.cached[8 + n] for n in range(6))
    for slot, tokens in outcome.tokens.items():
        row = pages.row(slot, slot // 8)
        assert row is not None
        assert (row.computed, row.cached) == (len(tokens), outcome.cached[slot])
        assert row.steps > row.computed or slot in (6, 14) or row.cached, "chunks of a prefill are steps"
        assert pages.final(slot, slot // 8, len(tokens), outcome.finish[slot]) is not None
    assert (pages.mismatches, pages.progress) == (0, it.steps)
    pages.close()
