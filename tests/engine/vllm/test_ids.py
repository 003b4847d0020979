"""Request ids name their slot, at a fixed place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.vllm.ids import LENGTH, MARK, SLOT_AT, make, parse


@given(st.integers(0, 2**40), st.integers(0, 65535), st.integers(0, 65535))
def test_what_was_put_in_comes_out(number: int, slot: int, generation: int) -> None:
    made = make("0a1b2c", number, slot, generation)
    assert len(made) == LENGTH
    assert made.startswith(MARK)
    assert int(made[SLOT_AT : SLOT_AT + 4], 16) == slot
    assert parse(made) == parse(made + "-0f3a") == (slot, generation)


@pytest.mark.parametrize("other", ["", "warmup_0", "ev", make("000000", 1, 2, 3)[:-1], make("000000", 1, 2, 3) + "x"])
def test_ids_of_others_are_not_ours(other: str) -> None:
    assert parse(other) is None
