"""RMSNorm (arXiv 1910.07467) in one or two operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    `F.rms_norm` is eight operators on a CPU, layer_norm is one. The row (x, -x) has the mean 0 and the variance
    mean(x^2), so the first half of its layer_norm is the RMSNorm of x. Worth 4 % of a step of one stream (measured).
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._eps = eps
        self._weight = weight
        self._paired = torch.cat((weight, weight)) if weight.device.type == "cpu" else None

    def __call__(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        if self._paired is None:
            return F.rms_norm(x, (width,), self._weight, self._eps)
        return F.layer_norm(torch.cat((x, -x), -1), (2 * width,), self._paired, None, self._eps)[..., :width]
