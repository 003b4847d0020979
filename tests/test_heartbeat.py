"""Hung or saturated."""

from __future__ import annotations

from evap.heartbeat import Heartbeat

S = 1_000_000_000


def test_work_without_progress_is_a_hang_and_ends_with_progress() -> None:
    it = Heartbeat(10 * S)
    assert not it.look(5, working=True, now_ns=100 * S)
    assert not it.look(5, working=True, now_ns=109 * S)
    assert it.look(5, working=True, now_ns=110 * S)
    assert it.hung
    assert not it.look(5, working=True, now_ns=200 * S), "said once"
    assert it.look(6, working=True, now_ns=201 * S)
    assert not it.hung


def test_what_is_said_of_a_hang() -> None:
    it = Heartbeat(10 * S)
    it.look(5, working=True, now_ns=100 * S)
    assert it.trouble(105 * S, 0) == ""
    it.look(5, working=True, now_ns=111 * S)
    said = "the engine has work and makes no progress for 11 s"
    assert it.trouble(111 * S, None) == said
    assert it.trouble(111 * S, 0) == f"{said}: between two steps"
    assert it.trouble(111 * S, 98 * S) == f"{said}: in one step for 13 s (if that is long: --hang-timeout)"


def test_an_idle_engine_and_a_saturated_one_do_not_hang() -> None:
    it = Heartbeat(10 * S)
    for second in range(0, 100, 5):
        it.look(1, working=False, now_ns=second * S)
        assert not it.hung
    for second in range(100, 200, 5):
        it.look(second, working=True, now_ns=second * S)
        assert not it.hung


def test_work_that_comes_after_a_long_rest_has_its_time() -> None:
    it = Heartbeat(10 * S)
    it.look(1, working=False, now_ns=0)
    it.look(1, working=True, now_ns=3 * S)
    it.look(1, working=True, now_ns=9 * S)
    assert not it.hung
    it.look(1, working=True, now_ns=14 * S)
    assert it.hung
    it.look(1, working=False, now_ns=15 * S)
    assert not it.hung


def test_never() -> None:
    it = Heartbeat(0)
    it.look(1, working=True, now_ns=0)
    assert not it.look(1, working=True, now_ns=10**18)
