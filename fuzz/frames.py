"""Invariant: whatever a client does, legal moves through h2 and raw frames in between, both sides agree on windows and
streams after each, and at the end every exchange is settled once and every slot is free (tests/fuzz/machine.py).

Bytes are hypothesis' choices, so that coverage guides a grammar. Run: `python -m fuzz.frames --seconds 60`.
"""

from __future__ import annotations

from typing import Any, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.runner import main
from tests.fuzz.machine import MOVES, life


@settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 5000), MOVES)
def target(window: int, moves: list[tuple[Any, ...]]) -> None:
    life(window, moves)


def one_input(data: bytes) -> None:
    cast("Any", target).hypothesis.fuzz_one_input(data)


if __name__ == "__main__":
    main(one_input, "frames")
