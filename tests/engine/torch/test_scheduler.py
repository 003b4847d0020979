"""The scheduler against a model of a cache: what it claims to be cached must be there, whatever was asked of it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.torch.cache import BlockPool
from evap.engine.torch.scheduler import MIN_CHUNK, OVERTAKE, Scheduler, Seq, Work
from evap.messages import Finish, GenerateRequest, SamplingParams

SIZE = 4
VOCAB = 50
EOS = frozenset({0})


def next_token(tokens: list[int]) -> int:
    """Stands for a greedy model."""
    return zlib.crc32(bytes(tokens)) % VOCAB


def request(
    prompt: list[int], max_tokens: int = 8, *, priority: int = 0, salt: str = "", **more: object
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **more)  # type: ignore[arg-type]
    return GenerateRequest(prompt_ids=prompt, sampling=sampling, priority=priority, cache_salt=salt)


def expected(asked: GenerateRequest, max_len: int) -> tuple[list[int], Finish]:
    """What a request must generate, alone and without a cache."""
    tokens = list(asked.prompt_ids)
    stop = set(asked.sampling.stop_token_ids) | (set() if asked.sampling.ignore_eos else EOS)
    while True:
        token = next_token(tokens)
        tokens.append(token)
        done = len(tokens) - len(asked.prompt_ids)
        if token in stop and done > asked.sampling.min_tokens:
            return tokens[len(asked.prompt_ids) :], Finish.STOP
        if done >= asked.sampling.max_tokens or len(tokens) >= max_len:
            return tokens[len(asked.prompt_ids) :], Finish.LENGTH


@dataclass
class Machine:
    """Runs a scheduler's steps on a fake cache: block -> the tokens whose keys and values it holds, with their past."""

    scheduler: Scheduler
    content: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    ended: dict[int, tuple[list[int], Finish]] = field(default_factory=dict)
    computed: int = 0

    def compute(self, item: Work) -> int:
        seq, size = item.seq, self.scheduler.pool.block_size
        past = (seq.request.cache_salt, tuple(seq.tokens))
        for position in range(item.start + item.count):
            place = seq.blocks[position // size], position % size
            mine = (zlib.crc32(past[0].encode()), *past[1][: position + 1])
            if position < item.start:
                assert self.content.get(place) == mine, "a position counts as cached and is not"
            else:
                self.content[place] = mine
        self.computed += item.count
        return next_token(seq.tokens) if item.last else -1

    def step(self) -> list[Work]:
        work, _ = self.scheduler.schedule()
        assert bool(work) != self.scheduler.idle
        finishes = self.scheduler.commit(work, [self.compute(item) for item in work])
        for item, finish in zip(work, finishes, strict=True):
            if finish is not Finish.NONE:
                self.end(item.seq, finish)
        return work

    def end(self, seq: Seq, finish: Finish) -> None:
        assert seq.slot not in self.ended
        self.ended[seq.slot] = (seq.tokens[seq.prompt_len :], finish)

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if self.scheduler.idle:
                return
            self.step()
        pytest.fail("requests are starving")


def machine(blocks: int = 16, *, max_running: int = 4, budget: int = 32, max_len: int = 0) -> Machine:
    pool = BlockPool(blocks, SIZE)
    return Machine(Scheduler(pool, max_running=max_running, budget=budget, max_len=max_len or blocks * SIZE))


def test_a_request_runs_to_its_end() -> None:
    it = machine()
    asked = request([1, 2, 3], 5, ignore_eos=True)
    it.scheduler.add(7, 1, asked, EOS)
    it.drain()
    assert it.ended == {7: expected(asked, 64)}
    assert it.scheduler.pool.free == 16


def test_a_prompt_without_room_for_a_token_is_refused() -> None:
    it = machine(blocks=2)
    for prompt in ([], [1] * 8):
        with pytest.raises(ValueError, match="does not fit"):
            it.scheduler.add(0, 0, request(prompt), EOS)


def test_decoding_goes_on_beside_a_long_prefill_cut_into_chunks() -> None:
    it = machine(64, budget=20)
    it.scheduler.add(1, 0, request([1, 2], 60, ignore_eos=True), EOS)
    it.step()
    it.scheduler.add(2, 0, request([3] * 100, 1), EOS)
    chunks = [[(item.seq.slot, item.count) for item in it.step()] for _ in range(5)]
    assert chunks == [[(1, 1), (2, 19)]] * 5


def test_a_chunk_is_smaller_where_attention_costs_more() -> None:
    pool = BlockPool(64, SIZE)
    it = Machine(Scheduler(pool, max_running=1, budget=64, max_len=256, cost_context=64))
    it.scheduler.add(1, 0, request([3] * 250, 1), EOS)
    counts = [it.step()[0].count for _ in range(4)]
    assert counts[:3] == [64, 32, 26]
    assert counts[-1] >= MIN_CHUNK


def test_the_prefix_cache_spares_all_but_the_last_block() -> None:
    it = machine()
    prompt = list(range(1, 13))
    for slot in (1, 2):
        it.scheduler.add(slot, 0, request(prompt, 1), EOS)
        it.drain()
    assert it.computed == 12 + 4
    it.scheduler.add(3, 0, request(prompt, 1, salt="other"), EOS)
    it.drain()
    assert it.computed == 12 + 4 + 12


def test_choices_of_one_prompt_compute_it_once() -> None:
    it = machine(max_running=4, budget=16)
    for slot in range(3):
        it.scheduler.add(slot, 0, request(list(range(1, 42)), 1), EOS)
    it.scheduler.add(3, 0, request([1, 2], 1), EOS)
    it.step()
    assert [seq.slot for seq in it.scheduler.running] == [0]  # the budget is spent
    it.drain()
    assert it.computed == 41 + 2 * 1 + 2
    assert list(it.ended) == [0, 3, 1, 2]  # 3 has another prompt and need not wait


def test_who_waits_for_a_block_does_not_hold_up_others_and_is_not_forgotten() -> None:
    it = machine(max_running=4, budget=16)
    first = it.scheduler.add(0, 0, request(list(range(1, 42)), 1), EOS)
    it.step()
    it.scheduler.add(1, 0, request(list(range(1, 42)), 1), EOS)
    it.scheduler.add(2, 0, request([9, 9], 1), EOS)
    it.scheduler.budget = 40
    it.scheduler.end(first)  # cancelled: nobody computes what 1 would have waited for
    it.end(first, Finish.CANCELLED)
    it.drain()
    assert list(it.ended) == [0, 1, 2]


def test_the_answer_is_cached_too_for_the_next_turn() -> None:
    it = machine()
    it.scheduler.add(1, 0, request([1, 2, 3], 9, ignore_eos=True), EOS)
    it.drain()
    turn = [1, 2, 3, *it.ended[1][0], 5]
    seq = it.scheduler.add(2, 0, request(turn, 1), EOS)
    it.drain()
    assert seq.cached == 8


def test_priority_overtakes_a_bounded_number_of_places() -> None:
    it = machine(max_running=1, budget=64)
    for slot in range(OVERTAKE + 2):
        it.scheduler.add(slot, 0, request([1], 1), EOS)
    it.scheduler.add(999, 0, request([1], 1, priority=-1), EOS)
    it.drain()
    assert list(it.ended).index(999) == 3  # behind arrivals 0, 1 and 2, which have waited longest


def test_when_blocks_run_out_the_last_comer_is_preempted_and_resumes() -> None:
    it = machine(blocks=6, max_len=24)
    asked = [request([slot] * 7, 14, ignore_eos=True) for slot in (1, 2)]
    for slot, one in enumerate(asked):
        it.scheduler.add(slot, 0, one, EOS)
    preempted = False
    while not it.scheduler.idle:
        it.step()
        preempted = preempted or any(seq.generated for seq in it.scheduler.waiting)
    assert preempted
    assert it.ended == {slot: expected(one, 24) for slot, one in enumerate(asked)}


def test_the_context_ends_a_generation() -> None:
    it = machine(max_len=10)
    it.scheduler.add(1, 0, request([1, 2, 3], 100, ignore_eos=True), EOS)
    it.drain()
    tokens, finish = it.ended[1]
    assert (len(tokens), finish) == (7, Finish.LENGTH)


def test_stop_tokens_wait_for_min_tokens() -> None:
    tokens = [1, 2, 3]
    first = next_token(tokens)
    it = machine()
    it.scheduler.add(1, 0, request(tokens, 5, stop_token_ids=(first,)), EOS)
    it.scheduler.add(2, 0, request(tokens, 5, stop_token_ids=(first,), min_tokens=5), EOS)
    it.drain()
    assert it.ended[1] == ([first], Finish.STOP)
    assert it.ended[2][1] is Finish.LENGTH


asks = st.builds(
    request,
    # Few tokens and shared beginnings: prefixes meet often.
    st.builds(
        lambda common, own: [9] * common + own, st.integers(0, 14), st.lists(st.integers(1, 3), min_size=1, max_size=8)
    ),
    st.integers(1, 12),
    priority=st.integers(-2, 2),
    salt=st.sampled_from(["", "a"]),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 2),
)


@given(
    blocks=st.integers(6, 20),
    max_running=st.integers(1, 5),
    budget=st.integers(16, 40),
    script=st.lists(st.one_of(asks, st.integers(0, 30)), max_size=30),
)
def test_every_request_ends_once_with_its_own_tokens(
    blocks: int, max_running: int, budget: int, script: list[GenerateRequest | int]
) -> None:
    """Requests, cancels and steps in any order: an integer cancels that slot and takes a step."""
    it = machine(blocks, max_running=max_running, budget=budget, max_len=24)
    seqs: dict[int, Seq] = {}
    for what in script:
        if isinstance(what, int):
            if what in seqs and what not in it.ended:
                it.scheduler.end(seqs[what])
                it.end(seqs[what], Finish.CANCELLED)
            it.step()
        elif len(what.prompt_ids) < 24:
            seqs[len(seqs)] = it.scheduler.add(len(seqs), 0, what, EOS)
    it.drain()
    assert it.ended.keys() == seqs.keys()
    assert it.scheduler.pool.free == blocks
    for slot, (tokens, finish) in it.ended.items():
        wanted, end = expected(seqs[slot].request, 24)
        if finish is Finish.CANCELLED:
            assert tokens == wanted[: len(tokens)]
        else:
            assert (tokens, finish) == (wanted, end)
