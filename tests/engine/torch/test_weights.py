from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from evap.engine.torch.config import load_config
from evap.engine.torch.weights import Store, load_weights
from evap.errors import StartupError
from tests.engine.torch.tiny import Maker

CPU = torch.device("cpu")


def test_projections_are_fused_in_order(make: Maker) -> None:
    model, path = make("Qwen2")
    weights = load_weights(path, load_config(path), CPU, torch.float32, lambda line: None)
    attention = model.model.layers[1].self_attn
    x = torch.randn(3, 32)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    theirs = torch.cat([projection(x) for projection in projections], -1)
    assert torch.allclose(weights.layers[1].qkv(x), theirs, atol=1e-5)
    assert weights.layers[1].q_norm is None


def test_qwen3_brings_norms_for_queries_and_keys(make: Maker) -> None:
    model, path = make("Qwen3")
    weights = load_weights(path, load_config(path), CPU, torch.float32, lambda line: None)
    x = torch.randn(3, 4, 16)
    for name in ("q_norm", "k_norm"):
        norm = getattr(weights.layers[0], name)
        assert torch.allclose(norm(x), getattr(model.model.layers[0].self_attn, name)(x), atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_may_be_the_embedding(make: Maker, tied: bool) -> None:
    model, path = make(tie_word_embeddings=tied)
    weights = load_weights(path, load_config(path), CPU, torch.float32, lambda line: None)
    x = torch.randn(2, 32)
    assert torch.allclose(weights.head(x), model.lm_head(x), atol=1e-5)


def test_shards_are_found_through_the_index(make: Maker) -> None:
    model, path = make(shard="20KB")
    assert not (path / "model.safetensors").exists()
    lines: list[str] = []
    load_weights(path, load_config(path), CPU, torch.float32, lines.append)
    assert lines == ["loading weights: layer 2 of 2"]
    assert torch.equal(Store(path).get("model.norm.weight"), model.model.norm.weight)


def test_half_precision(make: Maker) -> None:
    _, path = make()
    weights = load_weights(path, load_config(path), CPU, torch.bfloat16, lambda line: None)
    assert weights.embedding.dtype is torch.bfloat16


def test_damage_is_a_startup_error(tmp_path: Path, make: Maker) -> None:
    with pytest.raises(StartupError, match="weights"):
        Store(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + b"\x00" * 20)
    with pytest.raises(StartupError, match="weights"):
        Store(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(StartupError, match="gone"):
        Store(tmp_path).get("a")
    with pytest.raises(StartupError, match="no tensor"):
        Store(tmp_path).get("b")


def test_a_config_that_belongs_to_other_weights_is_refused(tmp_path: Path, make: Maker) -> None:
    _, path = make()
    raw = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "vocab_size": 99}))
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    with pytest.raises(StartupError, match="embedding has shape"):
        load_weights(tmp_path, load_config(tmp_path), CPU, torch.float32, lambda line: None)
