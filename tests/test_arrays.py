"""The quick spellings say what numpy says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evap.arrays import every, some


@given(flags=st.lists(st.booleans()), step=st.sampled_from([1, 2, -1]))
def test_every_and_some_are_all_and_any(flags: list[bool], step: int) -> None:
    array = np.array(flags, np.bool_)[::step]
    assert every(array) == bool(array.all())
    assert some(array) == bool(array.any())
