"""Held steps: nothing is lost, reordered, or held longer than said."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evap.coalesce import Coalescer, joined
from evap.messages import HAS_LOGPROBS, Finish, TokenBatch, TokenLogprobs
from tests.fakes import FakeLoop


def batch(tokens: list[int], flags: int = 0, step: int = 0) -> TokenBatch:
    column = np.array(tokens, np.int32)
    return TokenBatch(column * 0, column * 0, column, column * 0, np.full(len(tokens), flags, np.uint8), step)


def test_a_plain_step_waits_and_no_longer_than_said() -> None:
    loop, got = FakeLoop(), list[list[int]]()
    held = Coalescer(0.004, lambda b: got.append(b.token.tolist()), loop.call_later)
    held.on_batch(batch([1]))
    loop.run(0.003)
    held.on_batch(batch([2]))
    assert not got
    loop.run(0.0011)
    assert got == [[1, 2]]
    loop.run(1.0)
    held.on_batch(batch([3]))
    loop.run(0.0041)
    assert got == [[1, 2], [3]]


def test_an_end_is_not_held() -> None:
    loop, got = FakeLoop(), list[list[int]]()
    held = Coalescer(1.0, lambda b: got.append(b.token.tolist()), loop.call_later)
    held.on_batch(batch([1]))
    held.on_batch(batch([2], int(Finish.STOP)))
    assert got == [[1, 2]]
    loop.run(2.0)
    assert got == [[1, 2]]


@given(st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.booleans(), st.floats(0, 0.01))))
def test_every_record_once_and_in_order(steps: list[tuple[list[int], bool, float]]) -> None:
    loop, got = FakeLoop(), list[int]()
    held = Coalescer(0.004, lambda b: got.extend(b.token.tolist()), loop.call_later)
    for tokens, end, pause in steps:
        held.on_batch(batch(tokens, int(Finish.STOP) if end else 0))
        loop.run(pause)
    loop.run(1.0)
    assert got == [t for tokens, _, _ in steps for t in tokens]


def test_logprobs_stay_with_their_records() -> None:
    first, second = batch([1, 2], HAS_LOGPROBS, 1), batch([3], HAS_LOGPROBS, 2)
    first.logprobs = {0: TokenLogprobs(-1.0), 1: TokenLogprobs(-2.0)}
    second.logprobs = {0: TokenLogprobs(-3.0)}
    both = joined([first, second])
    assert [both.logprobs[i].logprob for i in range(3)] == [-1.0, -2.0, -3.0]
    assert both.step == 2
