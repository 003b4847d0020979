from __future__ import annotations

import pytest

from evap.engine.torch.pacer import LEAST, Pacer


@pytest.mark.parametrize(
    ("fixed_ms", "token_ms", "settled"),
    [(20, 0.5, 160), (5, 0.001, 512), (20, 10.0, LEAST), (400, 0.1, LEAST)],
)
def test_it_settles_where_a_step_takes_the_target(fixed_ms: float, token_ms: float, settled: int) -> None:
    pacer = Pacer(512, 100_000_000)
    for _ in range(40):
        pacer.took(pacer.budget, int((fixed_ms + token_ms * pacer.budget) * 1e6))
    assert abs(pacer.budget - settled) <= 2


def test_one_slow_step_is_forgotten() -> None:
    pacer = Pacer(512)
    pacer.took(512, 10_000_000_000)
    assert pacer.budget < 300
    for _ in range(10):
        pacer.took(pacer.budget, 1_000_000)
    assert pacer.budget == 512


def test_a_small_configured_chunk_is_the_floor_too() -> None:
    pacer = Pacer(16)
    pacer.took(16, 10_000_000_000)
    assert pacer.budget == 16


def test_readings_that_say_nothing_are_ignored() -> None:
    pacer = Pacer(512)
    pacer.took(0, 5)
    pacer.took(5, 0)
    assert pacer.budget == 512
