"""Weights from safetensors, fused and laid out for the device they run on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from evap.engine.torch.config import ModelConfig
from evap.engine.torch.linear import Linear
from evap.engine.torch.norm import RmsNorm
from evap.errors import StartupError, echo


@dataclass(slots=True)
class Layer:
    """One decoder layer. q_norm and k_norm are Qwen3's; (head_dim,) each."""

    input_norm: RmsNorm
    qkv: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    output: Linear
    post_norm: RmsNorm
    gate: Linear
    up: Linear
    down: Linear


@dataclass(slots=True)
class Weights:
    embedding: Tensor  # (vocab, hidden)
    layers: list[Layer]
    norm: RmsNorm
    head: Linear
    tied: bool  # the head is the embedding


class Store:
    """The tensors of a model directory by name, from one file or from the shards of an index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, Any] = {}
        self._where = _index(path)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str) -> Tensor:
        """A fresh CPU tensor. Raises StartupError if the model has none of that name, or the file is damaged."""
        file = self._where.get(name)
        if file is None:
            raise StartupError(f"the model has no tensor {echo(name)}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._path / file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise StartupError(f"cannot read {echo(file)}: {error}", remedy="fetch the model again") from error
        return tensor


def _index(path: Path) -> Mapping[str, str]:
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    try:
        if index.exists():
            return dict(json.loads(index.read_bytes())["weight_map"])
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise StartupError(f"cannot read the weights of {path}: {error}", remedy="fetch the model again") from error


def load_weights(
    path: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
) -> Weights:
    """Read, convert, fuse. `progress` gets a readable line now and then."""
    store = Store(path)

    def plain(name: str) -> Tensor:
        return store.get(name).to(device, dtype)

    def linear(*names: str) -> Linear:
        weight = torch.cat([plain(f"{name}.weight") for name in names])
        biased = [f"{name}.bias" in store for name in names]
        if any(biased) and not all(biased):
            raise StartupError("some of the fused projections have a bias and some do not")
        bias = torch.cat([plain(f"{name}.bias") for name in names]) if all(biased) else None
        return Linear(weight, bias)

    def norm(name: str) -> RmsNorm:
        return RmsNorm(plain(f"{name}.weight"), config.norm_eps)

    def layer(number: int) -> Layer:
        at = f"model.layers.{number}."
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        has_norm = f"{attention}q_norm.weight" in store
        return Layer(
            input_norm=norm(f"{at}input_layernorm"),
            qkv=linear(f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"),
            q_norm=norm(f"{attention}q_norm") if has_norm else None,
            k_norm=norm(f"{attention}k_norm") if has_norm else None,
            output=linear(f"{attention}o_proj"),
            post_norm=norm(f"{at}post_attention_layernorm"),
            gate=linear(f"{mlp}gate_proj"),
            up=linear(f"{mlp}up_proj"),
            down=linear(f"{mlp}down_proj"),
        )

    embedding = plain("model.embed_tokens.weight")
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise StartupError(f"the embedding has shape {tuple(embedding.shape)}, which config.json does not say")
    layers: list[Layer] = []
    for number in range(config.layers):
        layers.append(layer(number))
        if (number + 1) % 8 == 0 or number + 1 == config.layers:
            progress(f"loading weights: layer {number + 1} of {config.layers}")
    tied = config.tied or "lm_head.weight" not in store
    head = Linear(embedding, None) if tied else linear("lm_head")
    return Weights(embedding, layers, norm("model.norm"), head, tied)
