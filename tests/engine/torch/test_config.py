from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evap.engine.torch.config import load_config
from evap.errors import StartupError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 1000, "eos_token_id": 7,
    "rope_theta": 5000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


def write(path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_the_defaults_of_old_configs(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert (config.kv_heads, config.head_dim, config.tied, config.max_len) == (4, 16, False, 1000)
    assert config.rope.theta == 5000.0
    assert config.eos_ids == {7}
    assert config.kv_values == 3 * 2 * 4 * 16


def test_generation_config_has_the_last_word_on_eos(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, {"eos_token_id": [1, 2]})).eos_ids == {1, 2}
    assert load_config(write(tmp_path, {}, eos_token_id=...)).eos_ids == frozenset()


@pytest.mark.parametrize(
    ("scaling", "trained", "original", "context"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 1000, 1000, 4000),
        ({"type": "dynamic", "factor": 2.0}, 1000, 1000, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000, 1000, 4000),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 500}, 4000, 500, 4000),
        ({"rope_type": "default"}, 1000, 1000, 1000),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_in_old_and_new_spelling(
    tmp_path: Path, key: str, scaling: dict[str, Any], trained: int, original: int, context: int
) -> None:
    config = load_config(write(tmp_path, max_position_embeddings=trained, **{key: scaling}))
    assert config.rope.rope_type == scaling.get("rope_type", "dynamic")
    assert (config.rope.original_max, config.max_len) == (original, context)
    assert config.rope.theta == 5000.0


def test_an_override_scales_what_the_model_was_trained_on(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), '{"rope_type":"yarn","factor":4}')
    assert config.rope.rope_type == "yarn"
    assert (config.rope.original_max, config.max_len, config.rope.theta) == (1000, 4000, 5000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ...}, "without architectures"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, "sliding window"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"hidden_size": "many"}, "garbles"),
    ],
)
def test_what_it_cannot_run_is_refused_in_words(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        load_config(write(tmp_path, **changes))


def test_qwen_names_a_window_that_it_does_not_use(tmp_path: Path) -> None:
    load_config(write(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=512, use_sliding_window=False))


@pytest.mark.parametrize("text", ["{", "[1]", '{"rope_type":"other"}'])
def test_a_bad_override_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(StartupError, match="rope"):
        load_config(write(tmp_path), text)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_bad_file_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=r"config\.json"):
        load_config(tmp_path)
