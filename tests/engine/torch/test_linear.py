from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from evap.engine.torch import linear
from evap.engine.torch.linear import Linear, packing_works


@pytest.fixture(params=["packed", "plain"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(linear, "packing_works", lambda dtype: False)
    elif not packing_works(torch.float32):
        pytest.skip("this torch has no packed products")


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_products_and_epilogues(rows: int, biased: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    weight, x, other = torch.randn(24, 32).to(dtype), torch.randn(rows, 32).to(dtype), torch.randn(rows, 24).to(dtype)
    bias = torch.randn(24).to(dtype) if biased else None
    plain = F.linear(x.float(), weight.float(), bias.float() if bias is not None else None)
    kept = other.clone()
    layer = Linear(weight, bias)
    for got, wanted in (
        (layer(x), plain),
        (layer.silu(x), F.silu(plain)),
        (layer.times(x, other), plain * other.float()),
        (layer.plus(x, other), plain + other.float()),
    ):
        assert got.dtype is dtype
        assert torch.allclose(got.float(), wanted, rtol=tolerance, atol=tolerance * 4)
    assert torch.equal(other, kept)


def test_operators_that_are_missing_or_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object) -> torch.Tensor:
        raise AttributeError

    for broken in (missing, lambda x, w, b, name: torch.zeros(3, 48)):
        packing_works.cache_clear()
        monkeypatch.setattr(linear, "_pointwise", broken)
        assert not packing_works(torch.float32)
    packing_works.cache_clear()
