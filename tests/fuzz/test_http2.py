"""The corpus, and mutations of it, against the invariant of fuzz/http2.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import http2

CORPUS = sorted((Path(__file__).parents[2] / "fuzz" / "corpus" / "http2").iterdir())
SEEDS = [path.read_bytes() for path in CORPUS]


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name)
def test_corpus(path: Path) -> None:
    http2.one_input(path.read_bytes())


@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=6), st.integers(0, 6)), max_size=6),
)
def test_mutations(seed: bytes, edits: list[tuple[int, bytes, int]]) -> None:
    data = bytearray(seed)
    for at, put, cut in edits:
        data[at : at + cut] = put
    http2.one_input(bytes(data))
