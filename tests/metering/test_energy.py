"""A GPU's energy among exchanges: sums are exact, and nobody is charged twice for a token."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.messages import Usage
from evap.metering.energy import Energy, open_energy, processed
from evap.metering.nvml import Window
from tests.metering.rows import record


class Board:
    """Gives out the windows that it was given."""

    def __init__(self, *energies: int | None) -> None:
        self.left = list(energies)
        self.closed = False

    def sample(self, now_ns: int) -> Window | None:
        if not self.left:
            return None
        return Window(0, now_ns, self.left.pop(0), {"sm_percent": 50.0})

    def close(self) -> None:
        self.closed = True


def usage(computed: int, prompt: int = 10, cached: int = 4) -> Usage:
    return Usage(prompt=prompt, cached=cached, computed=computed)


def test_a_window_is_divided_by_tokens() -> None:
    board = Board(900, 100)
    it = Energy(board)
    it.tick(0, [("a", usage(3)), ("b", usage(12)), ("waits", usage(0))])  # 9 and 18 tokens
    assert (it.of("a"), it.of("b"), it.of("waits")) == (300, 600, 0)
    it.settled([record("a", prompt=10, cached=4, computed=4), record("c", prompt=1, cached=0, computed=3)])
    it.tick(0, [("b", usage(17))])  # 1, 4 and 5 tokens
    assert (it.of("a"), it.of("b"), it.of("c")) == (310, 650, 40)
    assert (it.total_mj, it.idle_mj) == (1000, 0)
    assert it.utilisation == {"sm_percent": 50.0}
    it.stop()
    assert board.closed


def test_an_idle_window_is_nobodys_and_a_board_without_a_counter_gives_nothing() -> None:
    it = Energy(Board(50, None))
    it.tick(0, [])
    assert (it.total_mj, it.idle_mj) == (50, 50)
    it.tick(0, [("a", usage(5))])
    assert (it.total_mj, it.of("a")) == (50, 0)
    it.tick(0, [("a", usage(50))])
    assert it.of("a") == 0, "no window yet"


@given(st.lists(st.tuples(st.integers(0, 10_000), st.lists(st.integers(0, 50), min_size=3, max_size=3)), max_size=6))
def test_the_parts_sum_to_the_whole(windows: list[tuple[int, list[int]]]) -> None:
    it = Energy(Board(*(energy for energy, _ in windows)))
    computed = [0, 0, 0]
    for _, steps in windows:
        computed = [before + more for before, more in zip(computed, steps, strict=True)]
        it.tick(0, [(str(n), usage(count)) for n, count in enumerate(computed)])
    assert it.total_mj == sum(energy for energy, _ in windows)
    assert sum(it.of(str(n)) for n in range(3)) + it.idle_mj == it.total_mj
    assert processed(usage(0)) == 0


def test_without_nvml_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_energy() is None
