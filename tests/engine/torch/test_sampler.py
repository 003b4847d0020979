from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.torch import sampler
from evap.engine.torch.sampler import Row, sample, uniform
from evap.messages import SamplingParams, TokenLogprobs

VOCAB = 1500
CPU = torch.device("cpu")


def row(
    prompt: list[int] | None = None, seed: int = 1, stop: tuple[int, ...] = (), vocab: int = VOCAB, **params: Any
) -> Row:
    sampling = SamplingParams(max_tokens=9, **params)
    return Row(sampling, prompt=prompt or [1], stop_ids=frozenset(stop), seed=seed, vocab=vocab, device=CPU)


def one(logits: torch.Tensor, it: Row, output: list[int] | None = None) -> tuple[int, TokenLogprobs | None]:
    tokens, logprobs = sample(logits[None], [it], [output or []])
    return tokens[0], logprobs[0]


def draws(logits: torch.Tensor, count: int = 400, **params: Any) -> Counter[int]:
    """Tokens that `count` seeds draw."""
    rows = [row(seed=seed, vocab=len(logits), **params) for seed in range(count)]
    tokens, _ = sample(logits.expand(count, -1), rows, [[]] * count)
    return Counter(tokens)


def test_uniform_numbers_are_spread_and_depend_on_both_arguments() -> None:
    numbers = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 10_000
    tenths = Counter(int(number * 10) for number in numbers)
    assert all(abs(count - 1000) < 150 for count in tenths.values())
    # Neighbouring indices must not be correlated either.
    rising = sum(uniform(7, index) < uniform(7, index + 1) for index in range(10_000))
    assert abs(rising - 5000) < 250


@given(st.integers(-(2**63), 2**64), st.integers(0, 2**31))
def test_any_seed_is_good(seed: int, index: int) -> None:
    assert 0 <= uniform(seed, index) < 1


def test_greedy_takes_the_first_best() -> None:
    logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16)
    logits[:, 7] = logits[:, 900] = 3
    assert sample(logits, [row(temperature=0.0)] * 2, [[], []]) == ([7, 7], [None, None])


@pytest.mark.parametrize("vocab", [128, 300, 1501, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_is_found_with_all_its_equals(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab).to(dtype)
    logits[1, [3, 40, vocab - 1]] = 9
    logits[2, vocab - 1] = 9
    logits[3] = math.nan
    logits[4] = -math.inf
    found = sampler._maxima(logits)
    assert found[0][0] == int(logits[0].float().argmax())
    assert found[1:4] == [[3, 40, vocab - 1], [vocab - 1], [0]]
    assert found[4] == list(range(vocab))


def test_equals_are_decided_by_whoever_can() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [4, 5]] = logits[1, 6] = logits[2, [8, 9]] = 1.0
    asked: list[tuple[int, list[int]]] = []

    def decide(line: int, ids: Sequence[int]) -> int:
        asked.append((line, list(ids)))
        return ids[-1]

    rows = [row(temperature=0.0)] * 3
    assert sample(logits, rows, [[]] * 3, decide)[0] == [5, 6, 9]
    assert asked == [(0, [4, 5]), (2, [8, 9])]
    assert sample(logits, rows, [[]] * 3)[0] == [4, 6, 8]


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -50.0])
    counts = draws(logits, 2000, temperature=0.7)
    for token, chance in enumerate(torch.softmax(logits / 0.7, -1).tolist()):
        assert abs(counts[token] / 2000 - chance) < 0.04


@pytest.mark.parametrize("width", [sampler._CANDIDATES, 2])
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {3, 2}),
        ({"top_p": 0.6}, {3}),  # 3 alone has 0.64
        ({"top_p": 0.7}, {3, 2}),  # 3 has 0.64, 3 and 2 together 0.88
        ({"min_p": 0.3}, {3, 2}),  # 2 has 0.37 of what 3 has
        ({"min_p": 0.1}, {3, 2, 1}),
        ({"top_k": 3, "top_p": 0.9}, {3, 2}),  # of the three, 3 and 2 have 0.91
        ({"top_p": 1e-9}, {3}),
        ({"top_k": 99}, {3, 2, 1, 0}),
        ({"top_p": 0.999}, {3, 2, 1, 0}),
    ],
)
def test_filters_keep_what_they_should(
    monkeypatch: pytest.MonkeyPatch, width: int, params: dict[str, Any], kept: set[int]
) -> None:
    """Softmax of 0, 1, 2, 3 is 0.03, 0.09, 0.24, 0.64. A width of 2 sends most of them down the slow path."""
    monkeypatch.setattr(sampler, "_CANDIDATES", width)
    assert set(draws(torch.tensor([0.0, 1.0, 2.0, 3.0]), **params)) == kept


@given(
    st.lists(st.floats(-8, 8, width=16), min_size=5, max_size=40),
    st.floats(0.05, 1.0),
    st.integers(0, 10),
    st.floats(0.0, 0.5),
    st.floats(0.1, 2.0),
    st.integers(0, 2**32),
)
def test_looking_at_few_candidates_changes_nothing(
    values: list[float], top_p: float, top_k: int, min_p: float, temperature: float, seed: int
) -> None:
    logits = torch.tensor(sorted(set(values)))  # ties may be broken either way
    it = row(seed=seed, vocab=len(logits), top_p=top_p, top_k=top_k, min_p=min_p, temperature=temperature)
    with pytest.MonkeyPatch.context() as patch:
        wide = one(logits, it)
        patch.setattr(sampler, "_CANDIDATES", 3)
        assert one(logits, it) == wide


def test_a_token_depends_on_its_own_row_only() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, VOCAB, generator=generator) * 3
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5, "presence_penalty": 1.0},
        {"temperature": 1.9, "min_p": 0.01, "logprobs": 3},
        {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": -0.5},
    ]
    outputs = [[1, 2, 3, 3][:n] for n in range(4)] + [[5], [6, 6]]
    rows = [row(seed=i, **kind) for i, kind in enumerate(kinds)]
    together = sample(logits, rows, outputs)
    alone = [one(logits[i], row(seed=i, **kind), outputs[i]) for i, kind in enumerate(kinds)]
    assert list(zip(*together, strict=True)) == alone
    backwards = sample(logits.flip(0), rows[::-1], outputs[::-1])
    assert list(zip(*backwards, strict=True)) == alone[::-1]


def test_the_same_seed_draws_the_same_at_the_same_place() -> None:
    logits = torch.randn(VOCAB)
    assert len({one(logits, row(seed=5), [0] * index)[0] for index in range(30)}) > 5
    assert one(logits, row(seed=5), [0] * 8) == one(logits, row(seed=5), [1] * 8)


def adjusted(logits: torch.Tensor, it: Row, output: list[int]) -> torch.Tensor:
    out = logits.clone()
    it.adjust(out, output)
    return out


def test_presence_and_frequency_count_the_output_only() -> None:
    it = row(prompt=[4, 4], presence_penalty=0.5, frequency_penalty=0.25)
    got = adjusted(torch.zeros(VOCAB), it, [2, 3, 3])
    assert got[[1, 2, 3, 4]].tolist() == [0.0, -0.75, -1.0, 0.0]
    # The next token is counted on top of the ones before.
    assert adjusted(torch.zeros(VOCAB), it, [2, 3, 3, 2])[2] == -1.0


def test_repetition_divides_what_is_positive_and_multiplies_the_rest() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0] + [1.0] * (VOCAB - 4))
    got = adjusted(logits, row(prompt=[0, 1], repetition_penalty=2.0), [2])
    assert got[:5].tolist() == [1.0, -4.0, 1.0, -2.0, 1.0]


def test_bias_and_min_tokens() -> None:
    it = row(stop=(3, 4), logit_bias={5: 100.0, 6: -100.0}, min_tokens=2)
    got = adjusted(torch.zeros(VOCAB), it, [1])
    assert got[[3, 4, 5, 6, 7]].tolist() == [-math.inf, -math.inf, 100.0, -100.0, 0.0]
    assert adjusted(torch.zeros(VOCAB), it, [1, 1])[3] == 0.0
    assert it.adjusts(5)
    assert row(min_tokens=2).adjusts(1)
    assert not row(min_tokens=2).adjusts(2)


def test_logprobs_are_the_models_own_whatever_was_done_to_the_logits() -> None:
    logits = torch.randn(VOCAB)
    raw = torch.log_softmax(logits, -1)
    token, entry = one(logits, row(temperature=0.0, logit_bias={11: 100.0}, logprobs=2))
    assert token == 11
    assert entry is not None
    assert entry.logprob == pytest.approx(float(raw[11]))
    best = raw.topk(2)
    assert [top.token for top in entry.top] == best.indices.tolist()
    assert [top.logprob for top in entry.top] == pytest.approx(best.values.tolist())
    assert one(logits, row(logprobs=0))[1] is not None


def test_the_callers_logits_are_left_alone() -> None:
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    sample(logits, [row(temperature=0.0, logit_bias={1: 5.0}, presence_penalty=1.0)], [[2]])
    assert torch.equal(logits, before)
