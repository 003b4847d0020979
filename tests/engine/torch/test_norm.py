from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from evap.engine.torch.norm import RmsNorm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (7, 3, 64)])
def test_it_is_rms_norm(shape: tuple[int, ...], scale: float, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    # A mean far from zero would give a true layer_norm away.
    x = ((torch.randn(shape) + 2) * scale).to(dtype)
    weight = torch.rand(64).to(dtype)
    got = RmsNorm(weight, 1e-6)(x)
    assert got.dtype is dtype
    assert torch.allclose(got.float(), F.rms_norm(x.float(), (64,), weight.float(), 1e-6), tolerance, tolerance)


def test_rows_of_zeros_stay_finite() -> None:
    assert torch.equal(RmsNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_elsewhere_than_on_a_cpu_it_is_torchs_own() -> None:
    norm = RmsNorm(torch.ones(8, device="meta"), 1e-6)
    assert norm(torch.zeros(2, 8, device="meta")).shape == (2, 8)
