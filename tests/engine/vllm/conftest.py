"""The model and the engines that tests of several files share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.vllm.live import Live, engine, serve
from tests.support import Server


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


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2, the built-in model, with sampling defaults of its own, which vLLM's server applies, and so must evap."""
    from evap.engine.model import resolve

    source, path = resolve("smollm2-135m").path, tmp_path_factory.mktemp("smollm2")
    for file in source.iterdir():
        (path / file.name).symlink_to(file)
    defaults = path / "generation_config.json"
    known = json.loads(defaults.read_text()) if defaults.exists() else {}
    defaults.unlink(missing_ok=True)
    defaults.write_text(json.dumps({**known, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}))
    return path


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Iterator[Server]:
    """evap with SmolLM2, named m."""
    yield from serve(
        "--model", str(smollm2), "--served-model-name", "m", "--max-model-len", "2048", "--kv-cache-mb", "256",
        "--dtype", "bfloat16",
    )  # fmt: skip
