"""The corpus, and mutations of it, against the invariant of fuzz/hpack.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.protocol.hpack_in import RequestDecoder
from fuzz import hpack, runner

CORPUS = sorted((Path(__file__).parents[2] / "fuzz" / "corpus" / "hpack").iterdir())
SEEDS = [path.read_bytes() for path in CORPUS]


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name)
def test_corpus(path: Path) -> None:
    hpack.one_input(path.read_bytes())


@given(st.integers(0, 1 << 62))
def test_mutations(seed: int) -> None:
    hpack.one_input(runner.mutated(SEEDS, random.Random(seed)))


def test_the_invariant_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestDecoder, "_entry", lambda self, index: (b"x", b"y"))
    indexed = (Path(__file__).parents[2] / "fuzz" / "corpus" / "hpack" / "bomb").read_bytes()
    with pytest.raises(AssertionError, match="not what hpack says"):
        hpack.one_input(indexed)
