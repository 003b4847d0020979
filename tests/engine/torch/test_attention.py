from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from evap.engine.torch.attention import PagedCache
from evap.engine.torch.plan import Lane, Planner, order

SIZE, HEADS, KV_HEADS, DIM = 4, 6, 2, 8
CPU = torch.device("cpu")


def naive(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The last rows of full causal attention. query (n, heads, dim); keys, values (length, kv_heads, dim)."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (keys, values))
    n, length = query.shape[0], keys.shape[1]
    mask = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    return F.scaled_dot_product_attention(query.transpose(0, 1), keys, values, mask).transpose(0, 1).reshape(n, -1)


@pytest.mark.parametrize("scattered", [True, False])
def test_any_mixture_of_work_attends_to_exactly_its_own_past(scattered: bool) -> None:
    torch.manual_seed(0)
    lengths = [1, 5, 8, 300, 17, 40]
    planner = Planner(SIZE, CPU, torch.float32)
    cache = PagedCache(torch.zeros(2, 200, SIZE, 2, KV_HEADS, DIM))
    free = torch.randperm(200).tolist() if scattered else list(range(200))
    qkv = [torch.randn(length, HEADS + 2 * KV_HEADS, DIM) for length in lengths]
    blocks = [[free.pop(0) for _ in range(-(-length // SIZE))] for length in lengths]

    def step(parts: list[tuple[int, int, int]]) -> None:
        """(sequence, start, count) each."""
        lanes = [Lane(blocks[i], start, count) for i, start, count in parts]
        parts = [parts[i] for i in order(lanes)]
        plan = planner.plan([lanes[i] for i in order(lanes)])
        rows = torch.cat([qkv[i][start : start + count] for i, start, count in parts])
        out = cache.attend(1, rows, HEADS, plan)
        wanted = [
            naive(
                qkv[i][start : start + count, :HEADS],
                qkv[i][: start + count, HEADS : HEADS + KV_HEADS],
                qkv[i][: start + count, HEADS + KV_HEADS :],
            )
            for i, start, count in parts
        ]
        assert torch.allclose(out, torch.cat(wanted), atol=1e-5)

    # Each sequence in two or three uneven chunks, the last token alone.
    for begin, end in ((0.0, 0.4), (0.4, 1.0)):
        cuts = [(i, int(begin * (n - 1)), int(end * (n - 1))) for i, n in enumerate(lengths)]
        step([(i, a, b - a) for i, a, b in cuts if b > a])
    step([(i, n - 1, 1) for i, n in enumerate(lengths)])
