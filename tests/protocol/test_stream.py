"""The transition table, pair by pair."""

from __future__ import annotations

import itertools

import pytest

from evap.protocol.stream import TABLE, Action, Input, State

PAIRS = list(itertools.product(State, Input))
#: Our END_STREAM before anything was answered, or after it was sent: only a bug of ours could ask for it.
IMPOSSIBLE = {(state, Input.SENT_END) for state in (State.RECEIVING, State.LINGERING, State.CLOSED)}


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair_is_in_the_table_or_impossible(state: State, event: Input) -> None:
    assert ((state, event) in TABLE) != ((state, event) in IMPOSSIBLE)


def test_closed_is_the_end() -> None:
    for (state, _), (action, after) in TABLE.items():
        if state is State.CLOSED:
            assert after is State.CLOSED
            assert action in (Action.LATE, Action.IGNORE)


def test_cancel_always_closes_and_only_for_what_takes_the_stream_away() -> None:
    for (state, event), (action, after) in TABLE.items():
        taken = event in (Input.RESET, Input.BROKEN, Input.GONE) and state is not State.CLOSED
        assert (action is Action.CANCEL) == taken
        if taken:
            assert after is State.CLOSED


def test_a_request_is_handed_over_from_one_place_only() -> None:
    assert [pair for pair, (action, _) in TABLE.items() if action is Action.HAND_OVER] == [(State.RECEIVING, Input.END)]


def test_no_way_leads_back() -> None:
    order = {State.RECEIVING: 0, State.EARLY: 1, State.LINGERING: 2, State.ANSWERING: 2, State.CLOSED: 3}
    assert all(order[after] >= order[state] for (state, _), (_, after) in TABLE.items())


def test_every_state_can_end() -> None:
    for state in State:
        assert TABLE[state, Input.GONE][1] is State.CLOSED
