"""Any sequence of moves of a client, legal or not, against the invariants of machine.py; and fuzz/frames.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import frames
from tests.fuzz import machine
from tests.fuzz.machine import MOVES, life, seeds

CORPUS = sorted((Path(__file__).parents[2] / "fuzz" / "corpus" / "frames").iterdir())


@settings(max_examples=max(40, settings().max_examples // 2))
@given(st.integers(0, 5000), MOVES)
def test_any_moves(window: int, moves: list[tuple[Any, ...]]) -> None:
    life(window, moves)


@pytest.mark.parametrize("number", range(4))
def test_seeds(number: int) -> None:
    assert seeds()[number]().handed >= (number != 3)


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name)
def test_corpus(path: Path) -> None:
    frames.one_input(path.read_bytes())


def test_the_invariant_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that spends a window twice, and one that forgets a slot."""
    moves: list[tuple[Any, ...]] = [("request", 1, 9, False, True), ("steps", 12)]
    monkeypatch.setattr(machine.Machine, "check", lambda self: None)
    life(65_535, moves)
    monkeypatch.undo()
    broken = machine.Machine(65_535)
    broken.server.conn.outbound_flow_control_window -= 1
    with pytest.raises(AssertionError):
        broken.play(moves)
    leaking = machine.Machine(65_535)
    leaking.dispatch.steps.slots.take(object())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a slot is lost"):
        leaking.finish()
