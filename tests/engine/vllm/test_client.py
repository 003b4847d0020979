"""Seam "core" against a live EngineCore: order, cancels at every moment, log probabilities, seeds, priorities."""

from __future__ import annotations

import pytest

from evap.messages import Finish, TokenLogprobs
from tests.engine.vllm.live import NEEDS_VLLM, Live, ask

pytestmark = NEEDS_VLLM


def test_the_same_prompt_greedily_is_the_same_answer(core: Live) -> None:
    first, second = core.generate(ask(range(2, 40), n=20), ask(range(2, 40), n=20))
    assert first.tokens == second.tokens
    assert len(first.tokens) == 20
    assert first.finish is Finish.LENGTH
    assert not first.silent


def test_a_step_is_one_batch(core: Live) -> None:
    """64 generations of 30 tokens need about 30 wakes, not 64 x 30."""
    before = core.batches
    core.largest_batch = 0
    results = core.generate(*[ask([n + 2, 9], n=30) for n in range(64)])
    assert sum(len(r.tokens) for r in results) == 64 * 30
    assert core.largest_batch >= 64
    assert core.batches - before < 64 * 30 / 4


def test_cached_prompt_tokens_are_told_once(core: Live) -> None:
    prompt = list(range(2, 600))
    cold = core.generate(ask(prompt, n=2))[0]
    warm = core.generate(ask(prompt, n=2))[0]
    assert cold.cached is not None
    assert warm.cached is not None
    assert warm.cached >= 512 > cold.cached
    assert warm.cached % 128 == 0  # whole blocks of the CPU build


def test_another_tenants_cache_is_not_used(core: Live) -> None:
    prompt = list(range(3, 700))
    core.generate(ask(prompt, n=2, cache_salt="a"))
    same, other = core.generate(ask(prompt, n=2, cache_salt="a"), ask(prompt, n=2, cache_salt="b"))
    assert (same.cached or 0) > 0
    assert other.cached == 0


def test_eos_and_stop_ids_end_silently(core: Live) -> None:
    tokens = core.generate(ask(range(2, 20), n=12))[0].tokens
    stop = next(t for t in tokens if t != tokens[0])
    (result,) = core.generate(ask(range(2, 20), n=12, stop_token_ids=(stop,)))
    assert result.tokens == tokens[: tokens.index(stop) + 1]
    assert (result.finish, result.silent) == (Finish.STOP, True)


def test_min_tokens_keeps_a_stop_id_away(core: Live) -> None:
    tokens = core.generate(ask(range(2, 20), n=12))[0].tokens
    (result,) = core.generate(ask(range(2, 20), n=12, stop_token_ids=(tokens[0],), min_tokens=4))
    assert len(result.tokens) >= 4
    assert tokens[0] not in result.tokens[:4]


def test_logit_bias_and_allowed_tokens_are_obeyed(core: Live) -> None:
    biased, allowed = core.generate(ask(n=3, logit_bias={77: 100.0}), ask(n=3, extra={"allowed_token_ids": [88]}))
    assert biased.tokens == [77] * 3
    assert allowed.tokens == [88] * 3


def test_seeds_are_kept_and_choices_differ(core: Live) -> None:
    one, again, other = core.generate(*[ask(n=16, temperature=1.0, seed=seed) for seed in (1, 1, 2)])
    assert one.tokens == again.tokens != other.tokens


def check(entries: list[TokenLogprobs], tokens: list[int], alternatives: int) -> None:
    assert len(entries) == len(tokens)
    for entry, token in zip(entries, tokens, strict=True):
        assert entry.logprob <= 0
        assert len(entry.top) == alternatives
        assert list(entry.top) == sorted(entry.top, key=lambda t: -t.logprob)
        if entry.top:
            assert entry.top[0].token == token  # greedy
            assert entry.top[0].logprob == pytest.approx(entry.logprob, abs=1e-5)


@pytest.mark.parametrize("alternatives", [0, 1, 20])
def test_log_probabilities(core: Live, alternatives: int) -> None:
    with_, without = core.generate(ask(range(2, 9), n=6, logprobs=alternatives), ask(range(2, 9), n=6))
    assert with_.tokens == without.tokens
    check(with_.logprobs, with_.tokens, alternatives)


def test_log_probabilities_of_the_prompt(core: Live) -> None:
    prompt = list(range(2, 302))  # three chunks of prefill
    (result,) = core.generate(ask(prompt, n=2, extra={"prompt_logprobs": 2}))
    assert result.prompt is not None
    assert len(result.prompt) == len(prompt)
    assert result.prompt[0] is None
    assert all(e is not None and len(e.top) == 2 and e.logprob <= 0 for e in result.prompt[1:])


def test_long_prompts_in_chunks_give_no_tokens_of_their_own(core: Live) -> None:
    results = core.generate(*[ask(range(2, 2 + size), n=5) for size in (100, 500, 1500)])
    assert [len(r.tokens) for r in results] == [5, 5, 5]


def test_cancel_before_during_and_after(core: Live) -> None:
    keys = core.submit([ask(n=1500) for _ in range(8)])
    core.do(lambda: [core.replica.cancel(*key) for key in keys[:2]] and None)
    core.wait(keys[2:], lambda r: len(r.tokens) >= 3)
    for key in keys[2:]:
        core.cancel(key)
    results = core.results(keys)
    assert {r.finish for r in results} == {Finish.CANCELLED}
    assert all(len(r.tokens) < 1500 for r in results)
    for key in keys:
        core.cancel(key)
    assert core.replica.running == 0


def test_a_cancel_stops_a_long_prefill_at_once(core: Live) -> None:
    """Another request makes a batch of every step: they tell how many steps the cancelled one still had of its 15."""
    (clock,) = core.submit([ask([7], n=1900)])
    core.wait([clock], lambda r: len(r.tokens) >= 2)
    (long,) = core.submit([ask([3 + 7 * n % 2000 for n in range(1900)], n=4)], first_slot=1)
    before: list[int] = []
    core.do(lambda: before.append(core.batches) or core.replica.cancel(*long))  # type: ignore[func-returns-value]
    (result,) = core.results([long])
    core.cancel(clock)
    core.results([clock])
    assert result.finish is Finish.CANCELLED
    assert result.tokens == []
    assert result.ended_at - before[0] <= 6, "two steps, those whose tokens were under way, and its own end"


def test_the_first_request_of_a_pass_goes_out_at_once_and_the_others_at_its_end(core: Live) -> None:
    left: list[int] = []

    def go() -> None:
        for slot in range(300, 303):
            core.replica.submit(slot, 60_200, ask(n=1))
            left.append(len(core.replica._seam._adds))

    core.do(go)
    core.generate(ask(n=8))
    assert left == [0, 1, 2]
    assert core.replica._seam._adds == []
    assert core.replica.running == 0


def test_requests_cancelled_in_the_same_pass_leave_nothing(core: Live) -> None:
    keys = [(slot, 60_100) for slot in range(10)]

    def go() -> None:
        for key in keys:
            core.replica.submit(*key, ask(n=1000))
            core.replica.cancel(*key)
        assert core.replica._seam._adds == []

    core.do(go)
    core.results(core.submit([ask(n=1)], first_slot=100))  # the first of the ten may have its slot still
    assert core.replica.running == 0


def test_a_method_that_is_not_there_is_an_error_and_nothing_else(core: Live) -> None:
    with pytest.raises(RuntimeError, match="no_such_method"):
        core.await_(_call(core, "no_such_method"))
    assert core.await_(_call(core, "is_scheduler_paused")) is False


async def _call(core: Live, method: str) -> object:
    return await core.replica._seam.call(method)


def test_priority_goes_first(core: Live) -> None:
    """With 64 places taken, a request of higher priority (a lower number) overtakes those that wait."""
    first = core.submit([ask(n=40) for _ in range(64)])
    patient = core.submit([ask(n=2, priority=5) for _ in range(40)], first_slot=100)
    core.results(core.submit([ask(n=2, priority=-5) for _ in range(2)], first_slot=200))
    waiting = [key for key in patient if not core.ended(key)]
    core.results([*first, *patient])
    assert waiting, "all the patient ones had ended before the urgent ones"
