"""Estimates: integers that add up, and a sampler that works with a made-up NVML and without any."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.metering.nvml import MIN_WINDOW_NS, Window, apportion, open_sampler


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_parts_add_up_and_are_within_one_of_the_exact_share(total: int, shares: list[int]) -> None:
    parts = apportion(total, shares)
    weights = shares if any(shares) else [1] * len(shares)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * sum(weights) - total * weight) < sum(weights)
    if any(shares):
        assert all(p == 0 for p, s in zip(parts, shares, strict=True) if s == 0)


def test_parts_of_nothing_and_of_nobody() -> None:
    assert apportion(5, []) == []
    assert apportion(0, [1, 2]) == [0, 0]
    assert apportion(5, [0, 0]) == [3, 2]
    for total, shares in ((-1, [1]), (1, [-1, 2])):
        with pytest.raises(ValueError, match="negative"):
            apportion(total, shares)


class FakeNvml:
    """pynvml as far as it is used. energy: what the counter says, None for a board without."""

    class NVMLError(Exception):
        pass

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY = 2, 3
    NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 5, 10

    def __init__(self, *, gpm: bool = True, devices: int = 1) -> None:
        self.gpm, self.devices = gpm, devices
        self.energy: int | None = 1000
        self.samples = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.devices = -1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= self.devices:
            raise self.NVMLError
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if self.energy is None:
            raise self.NVMLError
        return self.energy

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> Any:
        return SimpleNamespace(isSupportedDevice=self.gpm)

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return SimpleNamespace(taken=False)

    def nvmlGpmSampleGet(self, handle: int, sample: Any) -> None:
        sample.taken = True

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples -= 1

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0) for _ in range(98)])

    def nvmlGpmMetricsGet(self, query: Any) -> Any:
        assert query.version == 1
        assert query.sample1.taken
        assert query.sample2.taken
        for metric in query.metrics[: query.numMetrics]:
            metric.value = metric.metricId * 1.5
        return query


def sampler_of(monkeypatch: pytest.MonkeyPatch, fake: Any) -> Any:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return open_sampler()


def test_a_window_is_between_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    sampler = sampler_of(monkeypatch, fake)
    assert sampler.sample(0) is None
    fake.energy = 5000
    assert sampler.sample(MIN_WINDOW_NS - 1) is None
    window = sampler.sample(MIN_WINDOW_NS)
    utilisation = {"sm_percent": 3.0, "occupancy_percent": 4.5, "tensor_percent": 7.5, "dram_percent": 15.0}
    assert window == Window(0, MIN_WINDOW_NS, 4000, utilisation)
    assert all(name.endswith("_estimated") for name in Window._fields[2:])
    fake.energy = 10  # the driver was loaded again
    window = sampler.sample(2 * MIN_WINDOW_NS)
    assert window is not None
    assert window.energy_mj_estimated is None
    assert fake.samples == 1
    sampler.close()
    assert fake.samples == 0


def test_boards_without_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(gpm=False)
    fake.energy = None
    sampler = sampler_of(monkeypatch, fake)
    sampler.sample(0)
    assert sampler.sample(MIN_WINDOW_NS) == Window(0, MIN_WINDOW_NS, None, {})


def test_no_nvml_no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampler_of(monkeypatch, None) is None  # not installed
    assert sampler_of(monkeypatch, FakeNvml(devices=0)) is None  # no such device
