"""The model and the engines that tests of several files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.vllm.live import Live, engine


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one-layer Llama."""
    from bench.tiny_llama import build

    return build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def core(tiny: Path) -> Iterator[Live]:
    """Seam "core". Prefill in chunks of 128, requests served by priority."""
    options = ("scheduling_policy=priority", "max_num_batched_tokens=128", "max_num_seqs=64")
    with engine(tiny, vllm_arg=options) as live:
        yield live
