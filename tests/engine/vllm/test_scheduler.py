"""Final tokens through the ring, from a scheduler inside the engine: the same answers as by message, in any weather.

The engine here has a ring of 48 places (so that 64 requests overflow it), 14 blocks of KV cache (so that requests are
preempted), prefill in chunks of 128, and guesses tokens with n-grams. Every request is reconciled with the engine's own
account: `mismatches` stays 0 and nothing stays unsettled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evap.messages import Finish
from evap.metering.counters import WRITERS
from evap.metering.page import PageReader, format_page, map_page_file, open_page_file
from tests.engine.vllm.live import NEEDS_VLLM, Live, Result, ask, engine

pytestmark = NEEDS_VLLM

NGRAM = 'speculative_config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":2,"prompt_lookup_min":1}'
CHUNKS = "max_num_batched_tokens=128"
BLOCKS = "num_gpu_blocks_override=14"


def small(replica: Any) -> None:
    replica.ring_records = 48


@pytest.fixture(scope="module")
def ring(tiny: Path) -> Iterator[Live]:
    options = (CHUNKS, "max_num_seqs=64")
    with engine(tiny, small, token_path="scheduler", vllm_arg=options) as live:
        yield live


@pytest.fixture(scope="module")
def hard(tiny: Path) -> Iterator[Live]:
    """Speculating, and short of KV blocks."""
    options = (CHUNKS, BLOCKS, NGRAM, "max_num_seqs=64", "async_scheduling=false")
    with engine(tiny, small, token_path="scheduler", max_model_len=1024, vllm_arg=options) as live:
        yield live


def reconciled(live: Live) -> None:
    """Accounts come by message, behind the ring: a call through the same queue comes after them."""
    live.await_(_paused(live))
    assert live.replica.mismatches == 0
    assert live.replica._runs.unsettled == 0


async def _paused(live: Live) -> object:
    return await live.replica._seam.call("is_scheduler_paused")


def same(found: list[Result], wanted: list[Result]) -> None:
    assert [r.tokens for r in found] == [r.tokens for r in wanted]
    assert [r.finish for r in found] == [r.finish for r in wanted]
    assert [r.silent for r in found] == [r.silent for r in wanted]


def test_the_same_tokens_as_by_message(ring: Live, core: Live) -> None:
    requests = [ask([n + 2, 9, 11], n=3 + n) for n in range(12)]
    same(ring.generate(*requests), core.generate(*requests))
    reconciled(ring)


def test_a_full_ring_falls_back_to_messages(ring: Live, core: Live) -> None:
    requests = [ask([n + 2, 9], n=20) for n in range(64)]
    same(ring.generate(*requests), core.generate(*requests))
    reconciled(ring)


def test_partial_prefills_write_nothing(ring: Live, core: Live) -> None:
    requests = [ask(range(2, 2 + size), n=4) for size in (129, 700, 1900)]
    same(ring.generate(*requests), core.generate(*requests))
    reconciled(ring)


def test_stop_ids_eos_and_facts_arrive(ring: Live, core: Live) -> None:
    prompt = list(range(2, 400))
    plain = ring.generate(ask(prompt, n=12))[0]
    stop = next(t for t in plain.tokens if t != plain.tokens[0])
    request = ask(prompt, n=12, stop_token_ids=(stop,))
    found = ring.generate(request)
    same(found, core.generate(request))
    assert (found[0].finish, found[0].silent) == (Finish.STOP, True)
    assert (found[0].cached or 0) >= 256
    reconciled(ring)


def test_log_probabilities_go_by_message_beside_the_ring(ring: Live, core: Live) -> None:
    requests = [ask([5, 6], n=6, logprobs=2), ask([7, 8], n=6)]
    found = ring.generate(*requests)
    same(found, core.generate(*requests))
    assert len(found[0].logprobs) == 6
    reconciled(ring)


def test_cancels_at_any_time(ring: Live) -> None:
    """A stop string ends a request from outside while the engine goes on: late records are nobody's."""
    for at in (0, 1, 5):
        keys = ring.submit([ask([n + 2], n=1500) for n in range(10)])
        ring.wait(keys, lambda r, at=at: len(r.tokens) >= at)  # type: ignore[misc]
        for key in keys:
            ring.cancel(key)
        assert {r.finish for r in ring.results(keys)} == {Finish.CANCELLED}
    assert ring.replica.running == 0
    reconciled(ring)


def test_seeded_sampling_is_the_same_too(ring: Live, core: Live) -> None:
    requests = [ask([5, 6], n=10, temperature=1.0, seed=n) for n in range(6)]
    same(ring.generate(*requests), core.generate(*requests))


def test_speculation_gives_several_tokens_a_step(hard: Live, core: Live) -> None:
    """The prompt repeats itself, and n-grams of it are guessed; what was guessed wrong is not counted."""
    prompt = [20, 21, 22, 23] * 20
    wanted = core.generate(ask(prompt, n=60))
    tokens = wanted[0].tokens
    again = ask([*prompt, *tokens, *tokens[:4]], n=40)
    before = hard.batches
    same(hard.generate(again), core.generate(again))
    assert hard.batches - before < 45
    reconciled(hard)


def test_preempted_requests_give_each_token_once(hard: Live, core: Live) -> None:
    """Eight requests fit at first (a block each) and need five blocks each in the end; there are fourteen."""
    requests = [ask([n + 2, 30, 40], n=560) for n in range(8)]
    found = hard.generate(*requests)
    assert [len(r.tokens) for r in found] == [560] * 8
    assert all(r.finish is Finish.LENGTH for r in found)
    reconciled(hard)
    assert core.generate(*requests)[0].tokens[:8] == found[0].tokens[:8]


def test_cancels_while_preempting_and_speculating(hard: Live) -> None:
    keys = hard.submit([ask([n + 2, 30, 40], n=900) for n in range(12)])
    hard.wait(keys[:4], lambda r: len(r.tokens) > 100)
    for key in keys:
        hard.cancel(key)
    assert {r.finish for r in hard.results(keys)} == {Finish.CANCELLED}
    reconciled(hard)


@pytest.fixture(scope="module")
def ahead(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, PageReader]]:
    """An engine that schedules a step ahead. vLLM does not do so on a CPU by itself, but it can."""
    from evap.engine.vllm import options

    path = tmp_path_factory.mktemp("page") / "page"
    format_page(open_page_file(path, 256), 256, epoch_device_ns=time.monotonic_ns(), epoch_unix_ns=time.time_ns())
    choose = options.choose_scheduler

    def choose_ahead(scheduler_config: Any, token_path: str) -> None:
        scheduler_config.async_scheduling = True
        choose(scheduler_config, token_path)
        assert scheduler_config.scheduler_cls.endswith("AsyncRingScheduler")

    def before(replica: Any) -> None:
        small(replica)
        replica.meters = [{**WRITERS, "page": str(path)}]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "choose_scheduler", choose_ahead)
        with engine(tiny, before, token_path="scheduler", vllm_arg=(CHUNKS, "max_num_seqs=64")) as live:
            reader = PageReader(map_page_file(path)[0])
            yield live, reader
            reader.close()


def test_an_engine_that_runs_ahead_gives_the_same(ahead: tuple[Live, PageReader], core: Live) -> None:
    live, _ = ahead
    requests = [ask([n + 2, 9, 11], n=3 + n) for n in range(40)]
    same(live.generate(*requests), core.generate(*requests))
    plain = core.generate(ask(range(2, 20), n=12))[0].tokens
    stop = next(t for t in plain if t != plain[0])
    keys = live.submit([ask(range(2, 20), n=12, stop_token_ids=(stop,))])
    found = live.results(keys)
    assert found[0].tokens == plain[: plain.index(stop) + 1]
    reconciled(live)


def test_running_ahead_of_a_stop_is_counted_as_computed(ahead: tuple[Live, PageReader]) -> None:
    live, reader = ahead
    plain = live.generate(ask(range(2, 20), n=12))[0].tokens
    stop = next(t for t in plain if t != plain[0])
    companion = live.submit([ask(n=200)])  # keeps the engine stepping
    keys = live.submit([ask(range(2, 20), n=12, stop_token_ids=(stop,))], first_slot=9)
    (result,) = live.results(keys)
    live.results(companion)
    row = reader.row(9)
    assert row is not None
    assert row.computed == len(result.tokens) + 1


def test_cancels_while_running_ahead(ahead: tuple[Live, PageReader]) -> None:
    live, _ = ahead
    keys = live.submit([ask([n + 2], n=1500) for n in range(20)])
    live.wait(keys, lambda r: len(r.tokens) > 3)
    for key in keys:
        live.cancel(key)
    assert {r.finish for r in live.results(keys)} == {Finish.CANCELLED}
    reconciled(live)
