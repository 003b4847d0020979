"""Rotary position embeddings: frequencies for every scaling, and the rotation itself.

The frequency formulas follow `transformers.modeling_rope_utils`, number for number in float32; its sources are
RoFormer (arXiv 2104.09864), linear interpolation (arXiv 2306.15595), dynamic NTK (bloc97 and emozilla, 2023), YaRN
(arXiv 2309.00071) and Llama 3.1.

Dynamic NTK makes the frequencies depend on the length of the sequence. What is cached must not depend on how a prompt
was cut into chunks, so the length is a function of the request and the position only: the prompt's, or the position's
own once decoding has gone past it, rounded up to a multiple of the trained context. The rounding lets conversations
that grow share cached blocks; without it every turn would rotate its past anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from evap.engine.torch.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int, length: int = 0) -> tuple[Tensor, float]:
    """Angle per position, float32 of shape (dim / 2,), and the factor on cosine and sine.

    length: tokens of the sequence; matters for dynamic scaling beyond the trained context only.
    """
    base = rope.theta
    if rope.rope_type == "dynamic":
        ratio = max(length, rope.original_max) / rope.original_max
        base = base * ((rope.factor * ratio) - (rope.factor - 1)) ** (dim / (dim - 2))
    inverse = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.rope_type == "linear":
        return inverse / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, dim)
    return inverse, 1.0


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    smooth = (rope.original_max / wavelength - low) / (high - low)
    scaled = torch.where(wavelength > rope.original_max / low, inverse / rope.factor, inverse)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = (wavelength >= rope.original_max / high) & (wavelength <= rope.original_max / low)
    return torch.where(is_between, between, scaled)


def _yarn(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    def correction(rotations: float) -> float:
        return dim * math.log(rope.original_max / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp would be infinitely steep
    frequencies = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    inverse = 1.0 / (rope.factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep
    return inverse, _yarn_attention(rope)


def _yarn_attention(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def length_variant(rope: RopeConfig, prompt_len: int, position: int) -> int:
    """The length that the rotation of this position of this request depends on; 0 if on none (see above)."""
    length = max(prompt_len, position + 1)
    if rope.rope_type != "dynamic" or length <= rope.original_max:
        return 0
    return -(-length // rope.original_max) * rope.original_max


class Rotary:
    """Cosines and sines for the tokens of a step. Once per step, not per layer; no table as long as the context."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._device = device
        self._dtype = dtype
        self._known: dict[int, Tensor] = {}
        self._base, self._scale = inverse_frequencies(rope, head_dim)
        self._base = self._base.to(device)

    def angles(self, positions: Tensor, variants: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, each (tokens, 1, head_dim), for `rotate`.

        positions: (tokens,) on the device. variants: one `length_variant` per token, or empty if all are 0.
        """
        own = torch.stack([self._frequencies(variant) for variant in variants]) if any(variants) else None
        inverse = self._base if own is None else own
        half = positions.to(torch.float32)[:, None] * inverse
        cos, sin = half.cos() * self._scale, half.sin() * self._scale
        return (
            torch.cat((cos, cos), -1).to(self._dtype)[:, None],
            torch.cat((-sin, sin), -1).to(self._dtype)[:, None],
        )

    def _frequencies(self, variant: int) -> Tensor:
        if variant not in self._known:
            if len(self._known) > 1024:
                self._known.clear()
            self._known[variant] = inverse_frequencies(self._rope, self._head_dim, variant)[0].to(self._device)
        return self._known[variant]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (tokens, heads, head_dim), rotated in the half-split layout: x * cos + (-x2, x1) * sin.

    The sign of (-x2, x1) is in `sin` already, so swapping the halves is a roll.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
