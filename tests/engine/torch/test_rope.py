"""Frequencies and rotation against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evap.engine.torch.config import RopeConfig
from evap.engine.torch.rope import Rotary, inverse_frequencies, length_variant, rotate

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    YARN,
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    {**YARN, "attention_factor": 1.25},
    LLAMA3,
]


def ours(kind: dict[str, Any]) -> RopeConfig:
    known = {k: v for k, v in kind.items() if k != "original_max_position_embeddings"}
    return RopeConfig(theta=10_000.0, original_max=kind.get("original_max_position_embeddings", 256), **known)


@pytest.mark.parametrize("length", [0, 100, 256, 257, 1000, 200_000])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_frequencies_are_those_of_transformers(kind: dict[str, Any], length: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=256,
        rope_parameters={**kind, "rope_theta": 10_000.0},
    )  # fmt: skip
    theirs, their_scale = ROPE_INIT_FUNCTIONS[kind["rope_type"]](config, torch.device("cpu"), seq_len=length or None)
    mine, scale = inverse_frequencies(ours(kind), 32, length)
    assert torch.allclose(mine, theirs, rtol=1e-6, atol=0)
    assert scale == pytest.approx(their_scale)


def test_rotation_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.randn(5, 3, 32)
    positions = torch.tensor([0, 1, 7, 199_999, 3])
    cos, sin = Rotary(RopeConfig(), 32, torch.device("cpu"), torch.float32).angles(positions, ())
    theirs, _ = apply_rotary_pos_emb(x, x, cos[:, 0], torch.cat((-sin[:, 0, :16], sin[:, 0, 16:]), -1))
    assert torch.allclose(rotate(x, cos, sin), theirs, atol=1e-6)


def test_the_length_grows_in_steps_and_never_falls() -> None:
    rope = RopeConfig(rope_type="dynamic", factor=2.0, original_max=100)
    variants = [length_variant(rope, 150, position) for position in range(450)]
    assert variants[:200] == [200] * 200
    assert variants[200:300] == [300] * 100
    assert variants == sorted(variants)
    assert {length_variant(rope, 100, position) for position in range(100)} == {0}
    assert length_variant(RopeConfig(rope_type="linear", factor=2.0, original_max=100), 150, 0) == 0


def test_every_token_of_a_step_may_have_its_own_length() -> None:
    rope = RopeConfig(rope_type="dynamic", factor=2.0, original_max=100)
    rotary = Rotary(rope, 32, torch.device("cpu"), torch.float32)
    positions = torch.tensor([50, 250])
    cos, _ = rotary.angles(positions, [0, 300])
    for row, length in enumerate([0, 300]):
        inverse, _ = inverse_frequencies(rope, 32, length)
        assert torch.allclose(cos[row, 0, :16], (positions[row] * inverse).cos(), atol=1e-5)
