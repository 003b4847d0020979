"""Any sequence of moves of a client, legal or not, against the invariants of machine.py; and fuzz/frames.py."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import frames
from fuzz.runner import telling
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
    with pytest.raises(AssertionError, match="the connection's window, here and at the client: "):
        broken.play(moves)
    leaking = machine.Machine(65_535)
    leaking.dispatch.steps.slots.take(object())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a slot is lost"):
        leaking.finish()


def test_a_failure_says_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(self: machine.Machine) -> None:
        raise AssertionError("wrong")

    monkeypatch.setattr(machine.Machine, "check", check)
    data = CORPUS[0].read_bytes()
    with pytest.raises(AssertionError, match="wrong"):
        telling(frames.one_input, "frames")(data)
    said = capsys.readouterr().err
    again = re.search(r"to see it again: tests\.fuzz\.machine\.(life\(.*\))$", said, re.M)
    assert again
    with pytest.raises(AssertionError, match="wrong"):
        eval(again[1], {"life": life})
    text = re.search(r"python -m fuzz\.frames --input '(.*)'$", said, re.M)
    assert text
    assert base64.b64decode(text[1]) == data
