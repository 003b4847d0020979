"""Histograms: the buckets are Prometheus' (upper bounds are inclusive), and gaps are what a slow loop would count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap import histogram
from evap.histogram import Gaps, Histogram


def test_upper_bounds_are_inclusive() -> None:
    it = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.1, 99.0):
        it.observe(value)
    it.fold()
    assert it.counts.tolist() == [2, 2, 2]
    assert it.total == pytest.approx(106.1)


def test_what_waits_is_bounded() -> None:
    it = Histogram((1.0,))
    for _ in range(2 * histogram.FOLD + 1):
        it.observe(0.5)
    assert it.counts.tolist() == [2 * histogram.FOLD, 0]
    it.fold()
    it.fold()
    assert it.counts.tolist() == [2 * histogram.FOLD + 1, 0]


def test_weights_count_often() -> None:
    it = Histogram((1.0, 2.0))
    it.add(np.array([0.5, 3.0]), np.array([4, 2]))
    assert (it.counts.tolist(), it.total) == ([4, 0, 2], 8.0)


BOUNDS = (1e-9, 3e-9, 10e-9, 50e-9)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 20),  # time passes
            st.lists(st.integers(0, 5), max_size=8),  # slots with tokens
            st.lists(st.integers(0, 5), max_size=2),  # slots that get a new user before
            st.integers(1, 3),  # the same batch again
        ),
        max_size=30,
    )
)
def test_gaps_are_those_of_a_slow_loop(steps: list[tuple[int, list[int], list[int], int]]) -> None:
    gaps, expected = Gaps(6, Histogram(BOUNDS)), Histogram(BOUNDS)
    last: dict[int, int] = {}
    now = 1000
    for passed, slots, fresh, times in steps:
        for slot in fresh:
            gaps.begin(slot)
            last.pop(slot, None)
        for _ in range(times):
            now += passed
            gaps.note(np.array(slots, np.int32), now)
            for slot in set(slots):
                if slot in last:
                    expected.observe((now - last[slot]) / 1e9)
                last[slot] = now
    gaps.fold()
    expected.fold()
    assert gaps.histogram.counts.tolist() == expected.counts.tolist()
    assert gaps.histogram.total == pytest.approx(expected.total)


def test_what_waits_of_gaps_is_bounded() -> None:
    gaps = Gaps(2, Histogram(BOUNDS))
    for now in range(histogram.FOLD + 2):
        gaps.note(np.array([0, 1], np.int32), now)
    assert gaps.histogram.counts.sum() == 2 * histogram.FOLD + 0
    gaps.fold()
    assert gaps.histogram.counts.sum() == 2 * (histogram.FOLD + 1)
