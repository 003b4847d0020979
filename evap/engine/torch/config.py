"""A model's config.json as the numbers that this engine needs. Pure Python; refuses what it cannot run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evap.errors import StartupError, echo

ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES: Final = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. The names are those of Hugging Face's `rope_parameters`."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    #: Positions the model was trained on, before any scaling.
    original_max: int = 2048
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a decoder-only model of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    rope: RopeConfig
    #: Context in tokens, with the RoPE scaling that is set.
    max_len: int
    eos_ids: frozenset[int]
    stored_dtype: str  # of the weights, as the config names it

    @property
    def kv_values(self) -> int:
        """Numbers that one token keeps in the KV cache, in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim


def load_config(path: Path, rope_scaling: str = "") -> ModelConfig:
    """Read config.json (and generation_config.json) of a model directory.

    rope_scaling: JSON that replaces the model's scaling. Raises StartupError for what is missing or not supported.
    """
    raw = _read_json(path / "config.json")
    _refuse_unsupported(raw)
    try:
        return _from_raw(raw, _eos_ids(path, raw), rope_scaling)
    except (KeyError, TypeError, ValueError) as error:
        raise StartupError(f"config.json of {echo(str(path))} lacks or garbles {echo(str(error))}") from error


def _from_raw(raw: Mapping[str, Any], eos_ids: frozenset[int], rope_scaling: str) -> ModelConfig:
    heads = int(raw["num_attention_heads"])
    trained = int(raw["max_position_embeddings"])
    rope = _rope(raw, trained, rope_scaling)
    return ModelConfig(
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        rope=rope,
        max_len=_context(rope, trained, override=bool(rope_scaling)),
        eos_ids=eos_ids,
        stored_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _context(rope: RopeConfig, trained: int, *, override: bool) -> int:
    """max_position_embeddings of a scaled model is the scaled context for yarn and llama3, the trained one else."""
    if rope.rope_type in ("yarn", "llama3") and not override:
        return max(trained, rope.original_max)
    return int(max(trained, rope.original_max * rope.factor))


def _rope(raw: Mapping[str, Any], trained: int, override: str) -> RopeConfig:
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scaling: Mapping[str, Any] = _parse_override(override) if override else found
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise StartupError(f"rope type {echo(kind)} is not supported", remedy=f"one of {', '.join(ROPE_TYPES)}")
    original = scaling.get("original_max_position_embeddings")
    original_max = int(original) if original and kind in ("yarn", "llama3") else trained
    factor = scaling.get("factor")
    if factor is None:
        factor = trained / original_max if kind == "yarn" else 1.0
    optional = {name: scaling[name] for name in ("attention_factor", "mscale", "mscale_all_dim") if scaling.get(name)}
    return RopeConfig(
        rope_type=kind,
        theta=float(scaling.get("rope_theta") or found.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        factor=float(factor),
        original_max=original_max,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        **{name: float(value) for name, value in optional.items()},
    )


def _parse_override(text: str) -> Mapping[str, Any]:
    remedy = 'a JSON object such as {"rope_type":"dynamic","factor":4}'
    try:
        value = json.loads(text)
    except ValueError:
        raise StartupError("rope_scaling is not JSON", remedy=remedy) from None
    if not isinstance(value, dict):
        raise StartupError("rope_scaling is not a JSON object", remedy=remedy)
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    names = raw.get("architectures") or []
    if not any(name in ARCHITECTURES for name in names):
        raise StartupError(
            f"the torch engine does not run {echo(', '.join(map(str, names)) or 'a model without architectures')}",
            remedy=f"it runs {', '.join(ARCHITECTURES)}; vLLM runs many more (--engine vllm)",
        )
    partial = (raw.get("rope_parameters") or {}).get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    window = raw.get("sliding_window") if raw.get("use_sliding_window", "Mistral" in names[0]) else None
    for what, bad in (
        ("an activation other than silu", raw.get("hidden_act", "silu") != "silu"),
        ("partial rotary embeddings", partial != 1),
        ("a sliding window", bool(window) and int(window or 0) < int(raw.get("max_position_embeddings", 0))),
        ("quantised weights", bool(raw.get("quantization_config"))),
    ):
        if bad:
            raise StartupError(f"the torch engine does not run {what}", remedy="vLLM does (--engine vllm)")


def _eos_ids(path: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    """generation_config.json is what the model's authors say ends a turn; config.json is the older place."""
    generation = path / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return frozenset()
    return frozenset(int(i) for i in (value if isinstance(value, list) else [value]))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"cannot read {path.name}: {error.strerror}", remedy="is this a model directory?") from error
    except ValueError as error:
        raise StartupError(f"{path.name} is not JSON") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path.name} is not a JSON object")
    return value
