"""Who holds most: the same as if all were looked at, and cheap however often it is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.shares import MIN_STALE, Shares


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=120))
def test_the_longest_is_the_longest(steps: list[tuple[int, int, bool]]) -> None:
    shares, model = Shares[int](10, 100), dict[int, tuple[int, int]]()
    for number, (flow, tokens, ask) in enumerate(steps):
        mine = [entry for entry, (whose, _) in model.items() if whose == flow]
        if mine and tokens % 3 == 0:
            shares.remove(flow, mine[0], mine[0] % 3)
            del model[mine[0]]
        else:
            shares.add(flow, number, number % 3, tokens)
            model[number] = flow, tokens
        if ask:
            weights = dict[int, float]()
            for whose in {whose for whose, _ in model.values()}:
                held = [size for owner, size in model.values() if owner == whose]
                weights[whose] = max(len(held) / 10, sum(held) / 100)
                assert shares.weight(whose) == weights[whose]
                assert shares.last(whose) == max((e for e in model if model[e][0] == whose), key=lambda e: (e % 3, e))
            found, weight = shares.longest()
            assert weight == max(weights.values(), default=0.0)
            assert weights.get(found, 0.0) == weight  # type: ignore[call-overload]
    assert len(shares) == len({whose for whose, _ in model.values()})


def test_ranks_take_no_more_room_than_shares() -> None:
    shares = Shares[int](100, 100)
    for number in range(20_000):
        shares.add(number % 7, number, 0, 1)
        if number >= 50:
            shares.remove((number - 50) % 7, number - 50, 0)
    assert len(shares._heap) <= 2 * MIN_STALE
    assert len(shares) == 7
    with pytest.raises(KeyError):
        shares.remove(0, 1, 0)


def test_nobody() -> None:
    shares = Shares[int](0, 0)
    assert shares.longest() == (None, 0.0)
    assert shares.count("x") == 0
    assert shares.weight("x", 1, 0) == 1.0
