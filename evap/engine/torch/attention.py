"""Attention over the paged KV cache with torch's own operators.

The cache is one tensor (layers, blocks, block_size, 2, kv_heads, head_dim): a position's key and value lie side by
side, so a step's are written with one operator per layer, and a sequence whose blocks are consecutive is read in place.

Query heads that share a KV head are rows of one small matrix when decoding (four to five times faster than
`enable_gqa` on a CPU), and a batch with a KV head of stride 0 in a prefill.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evap.engine.torch.plan import Group, Pages, Plan


class PagedCache:
    """The KV tensor and attention over it."""

    def __init__(self, kv: Tensor) -> None:
        """kv: (layers, blocks, block_size, 2, kv_heads, head_dim), zeros (padding is masked, but 0 * NaN is NaN)."""
        self._kv = kv
        self._kv_heads, self._head_dim = kv.shape[4:]

    def attend(self, layer: int, qkv: Tensor, heads: int, step: Plan) -> Tensor:
        """qkv (tokens, heads + 2 kv_heads, head_dim), rotated. Stores keys, values; returns (tokens, heads * dim)."""
        kv_heads, dim = self._kv_heads, self._head_dim
        cache = self._kv[layer]
        cache.view(-1, 2, kv_heads, dim).index_copy_(0, step.places, qkv[:, heads:].view(-1, 2, kv_heads, dim))
        query = qkv[:, :heads]
        parts = [self._decode(cache, query[group.begin : group.end], group) for group in step.decodes]
        for group in step.prefills:
            parts.append(self._prefill(cache, query[group.begin : group.end], group))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, cache: Tensor, pages: Pages, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each (sequences, kv_heads, length, head_dim), strided."""
        if pages.blocks is None:
            kv = cache.view(-1, 2, self._kv_heads, self._head_dim)[pages.first : pages.first + pages.length]
            kv = kv.unsqueeze(0)
        else:
            # Whole blocks as flat rows: a copy of some ten kilobytes each, not one of a hundred bytes per head.
            rows = cache.view(cache.shape[0], -1).index_select(0, pages.blocks)
            kv = rows.view(sequences, -1, 2, self._kv_heads, self._head_dim)[:, : pages.length]
        return kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)

    def _decode(self, cache: Tensor, query: Tensor, group: Group) -> Tensor:
        sequences = query.shape[0]
        keys, values = self._read(cache, group.pages, sequences)
        rows = query.reshape(sequences, self._kv_heads, -1, self._head_dim)
        return F.scaled_dot_product_attention(rows, keys, values, group.mask).reshape(sequences, -1)

    def _prefill(self, cache: Tensor, query: Tensor, group: Group) -> Tensor:
        count, heads, dim = query.shape
        keys, values = self._read(cache, group.pages, 1)
        shape = (self._kv_heads, heads // self._kv_heads, keys.shape[2], dim)
        rows = query.transpose(0, 1).view(self._kv_heads, -1, count, dim)
        keys, values = keys[0].unsqueeze(1).expand(shape), values[0].unsqueeze(1).expand(shape)
        out = F.scaled_dot_product_attention(rows, keys, values, group.mask, is_causal=group.mask is None)
        return out.reshape(heads, count, dim).transpose(0, 1).reshape(count, -1)
