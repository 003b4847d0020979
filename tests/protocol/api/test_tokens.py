"""Token ids: four bytes each, and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evap.errors import EngineFailed
from evap.messages import Usage
from evap.protocol.api.tokens import TokensRenderer


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_ids_are_little_endian_u32(ids: list[int]) -> None:
    data = TokensRenderer("x").tokens(ids)
    assert np.frombuffer(data, "<u4").tolist() == ids


def test_only_ids() -> None:
    r = TokensRenderer("x")
    parts = [
        r.prelude(0), r.delta(0, "text"), r.finish(0, "stop"), r.usage(Usage()), r.error(EngineFailed("x")), r.done(),
    ]  # fmt: skip
    assert b"".join(parts) == b""
    assert r.row(0) == (b"", b"")
    assert r.stream_type == b"application/vnd.evap.tokens"
