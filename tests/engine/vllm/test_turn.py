"""Engines start one after the other, and leave the environment as they found it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from evap.engine.vllm.turn import Turn
from evap.errors import StartupError
from tests.support import TIME_FACTOR

PATIENCE_S = 10 * TIME_FACTOR


def test_one_after_the_other() -> None:
    first, second = Turn(), Turn()
    first.begin()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.begin)
        assert wait([waiting], 0.05).not_done
        first.end()
        first.end()
        waiting.result(PATIENCE_S)
    second.end()


def test_starts_that_are_cancelled_while_they_wait_leave_the_turn_to_others() -> None:
    first, second, third, fourth = (Turn() for _ in range(4))
    first.begin()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(turn.begin) for turn in (second, third)]
        second.end()
        third.end()
        assert wait(waiting, 0.05).not_done
        first.end()
        for future in waiting:
            assert isinstance(future.exception(PATIENCE_S), StartupError)
    fourth.begin()
    fourth.end()


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
    with pytest.raises(StartupError, match="stopped while starting"):
        turn.put("EVAP_TEST_B", "too late")
    assert "EVAP_TEST_B" not in os.environ
