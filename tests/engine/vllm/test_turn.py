"""Engines start one after the other, and leave the environment as they found it."""

from __future__ import annotations

import os
import threading

import pytest

from evap.engine.vllm.turn import Turn
from tests.support import TIME_FACTOR


def test_one_after_the_other() -> None:
    first, second = Turn(), Turn()
    first.begin()
    waiting = threading.Thread(target=second.begin, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    second.end()  # not its turn yet: nothing happens
    first.end()
    first.end()
    waiting.join(10 * TIME_FACTOR)
    assert not waiting.is_alive()
    second.end()


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAP_TEST_A", "the user's")
    monkeypatch.delenv("EVAP_TEST_B", raising=False)
    turn = Turn()
    turn.begin()
    for value in ("first", "second"):
        turn.put("EVAP_TEST_A", value)
        turn.put("EVAP_TEST_B", value)
    assert (os.environ["EVAP_TEST_A"], os.environ["EVAP_TEST_B"]) == ("second", "second")
    turn.end()
    assert os.environ["EVAP_TEST_A"] == "the user's"
    assert "EVAP_TEST_B" not in os.environ
