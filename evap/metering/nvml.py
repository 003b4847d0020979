"""Energy and utilisation of a GPU per window, from NVML, and their apportioning over exchanges. All of it estimates.

Energy is the driver's counter of the whole board (its power sensor sees a fraction of the time: arXiv 2312.02741);
utilisation comes from GPM samples, on Hopper and later. Neither can be read for one request: a window's energy is
divided in proportion to each request's share of step time, and every name says `estimated`. Without NVML, or without a
GPU, there are no windows and nothing fails. The only importer of pynvml.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

#: GPM metric -> (name of pynvml's constant, our name); per cent of the window.
_GPM: Final = (
    ("NVML_GPM_METRIC_SM_UTIL", "sm_percent"),
    ("NVML_GPM_METRIC_SM_OCCUPANCY", "occupancy_percent"),
    ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", "tensor_percent"),
    ("NVML_GPM_METRIC_DRAM_BW_UTIL", "dram_percent"),
)
#: GPM needs samples at least this far apart.
MIN_WINDOW_NS: Final = 100_000_000


class Window(NamedTuple):
    """A device between two samples. energy None: the board has no counter. Utilisation is empty without GPM."""

    start_ns: int
    end_ns: int
    energy_mj_estimated: int | None
    utilisation_estimated: dict[str, float]


def apportion(total: int, shares: Sequence[int]) -> list[int]:
    """`total` in proportion to `shares` (>= 0), in integers that sum to it exactly; equal parts when all shares are 0.

    Largest remainder; of equal remainders the first wins. [] for no shares. Raises ValueError for a negative number.
    """
    if total < 0 or any(s < 0 for s in shares):
        raise ValueError("shares and total must not be negative")
    if not shares:
        return []
    weights = shares if any(shares) else [1] * len(shares)
    whole = sum(weights)
    parts = [total * w // whole for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def open_sampler(device: int = 0) -> NvmlSampler | None:
    """None when there is no pynvml, no driver, or no such device."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return NvmlSampler(pynvml, pynvml.nvmlDeviceGetHandleByIndex(device))
    except pynvml.NVMLError:
        return None


class NvmlSampler:
    """Windows of one device: from one `sample` to the next."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._nvml, self._handle = pynvml, handle
        self._gpm = self._gpm_supported()
        self._last: tuple[int, int | None, Any] | None = None

    def sample(self, now_ns: int) -> Window | None:
        """The window since the last sample that counted; None at first, and for one shorter than MIN_WINDOW_NS."""
        if self._last is not None and now_ns - self._last[0] < MIN_WINDOW_NS:
            return None
        last, self._last = self._last, (now_ns, self._energy_mj(), self._gpm_sample())
        if last is None:
            return None
        then_ns, then_mj, then_gpm = last
        mj = self._last[1]
        energy = None if mj is None or then_mj is None or mj < then_mj else mj - then_mj
        utilisation = self._utilisation(then_gpm, self._last[2])
        if then_gpm is not None:
            self._nvml.nvmlGpmSampleFree(then_gpm)
        return Window(then_ns, now_ns, energy, utilisation)

    def _energy_mj(self) -> int | None:
        """Since the driver was loaded; None where the board cannot say."""
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:
            return None

    def _gpm_supported(self) -> bool:
        try:
            return bool(self._nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)
        except (self._nvml.NVMLError, AttributeError):  # an old driver, or an old pynvml
            return False

    def _gpm_sample(self) -> Any:
        if not self._gpm:
            return None
        try:
            taken = self._nvml.nvmlGpmSampleAlloc()
            self._nvml.nvmlGpmSampleGet(self._handle, taken)
        except self._nvml.NVMLError:
            return None
        return taken

    def _utilisation(self, then: Any, now: Any) -> dict[str, float]:
        if then is None or now is None:
            return {}
        query = self._nvml.c_nvmlGpmMetricsGet_t()
        query.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(_GPM)
        query.sample1, query.sample2 = then, now
        for i, (constant, _) in enumerate(_GPM):
            query.metrics[i].metricId = getattr(self._nvml, constant)
        try:
            result = self._nvml.nvmlGpmMetricsGet(query)
        except self._nvml.NVMLError:
            return {}
        return {name: float(result.metrics[i].value) for i, (_, name) in enumerate(_GPM)}

    def close(self) -> None:
        if self._last is not None and self._last[2] is not None:
            self._nvml.nvmlGpmSampleFree(self._last[2])
        self._last = None
        self._nvml.nvmlShutdown()
