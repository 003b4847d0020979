"""The forward pass of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from evap.engine.torch.attention import PagedCache
from evap.engine.torch.config import ModelConfig
from evap.engine.torch.plan import Plan
from evap.engine.torch.rope import Rotary, rotate
from evap.engine.torch.weights import Layer, Weights


class Model:
    """Weights, cache and rotation, joined."""

    def __init__(self, config: ModelConfig, weights: Weights, cache: PagedCache, rotary: Rotary) -> None:
        self._config = config
        self._weights = weights
        self._cache = cache
        self._rotary = rotary
        self.beat: Callable[[], None] = lambda: None  #: called after each layer

    def forward(self, tokens: Tensor, plan: Plan, variants: Sequence[int], rows: Tensor | None) -> Tensor:
        """`hidden` and `logits` in one."""
        return self.logits(self.hidden(tokens, plan, variants, rows))

    def hidden(self, tokens: Tensor, plan: Plan, variants: Sequence[int], rows: Tensor | None) -> Tensor:
        """What the head sees, (len(rows), hidden), for the given rows of the step (None: all).

        tokens: int64 (n,), in the order that `plan` was made for. variants: see `Rotary.angles`. Writes the cache.
        """
        cos, sin = self._rotary.angles(plan.positions, variants)
        x = F.embedding(tokens, self._weights.embedding)
        for number, layer in enumerate(self._weights.layers):
            qkv = self._qkv(layer, x, cos, sin)
            x = layer.output.plus(self._cache.attend(number, qkv, self._config.heads, plan), x)
            y = layer.post_norm(x)
            x = layer.down.plus(layer.up.times(y, layer.gate.silu(y)), x)
            self.beat()
        return self._weights.norm(x if rows is None else x.index_select(0, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab), in the model's dtype."""
        if not len(hidden):
            return hidden.new_empty((0, self._config.vocab_size))
        return self._weights.head(hidden)

    def decider(self, hidden: Tensor) -> Callable[[int, Sequence[int]], int] | None:
        """(row, token ids) -> the id with the greatest logit in float32, for ids whose rounded logits are equal.

        bfloat16 has steps of 1/8 where logits are largest, so one greedy token in seventy is a tie of the best, and
        taking the first would be wrong half of the time. None where rounding is not the question, or where the head
        is laid out for its product only (a head that is not the embedding, on a CPU).
        """
        weight = self._weights.embedding if self._weights.tied else None
        if weight is None or weight.dtype is torch.float32:
            return None

        def decide(row: int, ids: Sequence[int]) -> int:
            lines = weight[torch.tensor(ids, device=weight.device)].float()
            return ids[int((lines @ hidden[row].float()).argmax())]

        return decide

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values, (n, heads + 2 kv_heads, head_dim); the first two rotated."""
        heads, turned = self._config.heads, self._config.heads + self._config.kv_heads
        qkv = layer.qkv(layer.input_norm(x)).view(x.shape[0], -1, self._config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :heads] = layer.q_norm(qkv[:, :heads])
            qkv[:, heads:turned] = layer.k_norm(qkv[:, heads:turned])
        qkv[:, :turned] = rotate(qkv[:, :turned], cos, sin)
        return qkv


def pick_device(name: str) -> torch.device:
    """'auto' is the first GPU, if there is one. Raises RuntimeError for a device that torch does not have."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(name: str, device: torch.device, stored: str) -> torch.dtype:
    """'auto' is half precision on a GPU, bfloat16 on a CPU that multiplies it natively, else float32."""
    named: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name != "auto":
        return named[name]
    if device.type == "cuda":
        return torch.float16 if stored == "float16" else torch.bfloat16
    return torch.bfloat16 if native_bfloat16() else torch.float32


def native_bfloat16() -> bool:
    """AVX512-BF16 or AMX. Without either, bfloat16 is emulated and slower than float32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
