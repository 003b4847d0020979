"""Who writes an engine's counters page: kernels on a GPU, their host build, numpy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from evap.engine import meter as meter_module
from evap.engine.meter import StepMeter, open_writer
from evap.errors import OutdatedError
from evap.metering import build, layout
from evap.metering.counters import Counters
from evap.metering.writer import CompiledMeter, NumpyMeter


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Counters]:
    it = Counters(8, 1, tmp_path, ahead=False, now_ns=0, unix_ns=0)
    yield it
    it.close()


def test_a_step_is_counted(pages: Counters) -> None:
    times = iter(range(1_000_000, 100_000_000, 1_000_000))
    meter = StepMeter(pages.specs[0], now_ns=times.__next__)
    meter.begin([(3, 7, 20, 16, 100, -1), (4, 1, 30, 0, 100, -1)])
    meter.step([3, 4], [65, 0], [True, False])
    meter.begin([])
    meter.step([3, 4], [66, 67], [True, True])
    rows = [pages.row(3, 7), pages.row(4, 1)]
    assert [(r.prompt, r.cached, r.computed, r.steps) for r in rows if r] == [(20, 16, 2, 2), (30, 0, 1, 2)]
    assert pages.progress == 2


@pytest.mark.parametrize("compiler", [True, False])
def test_a_page_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: bool) -> None:
    with monkeypatch.context() as other:
        other.setattr(layout, "PAGE_VERSION", layout.PAGE_VERSION + 1)
        it = Counters(8, 1, tmp_path, ahead=False, now_ns=0, unix_ns=0)
    if not compiler:
        monkeypatch.setattr(build, "host_library", lambda: 1 / 0)
        monkeypatch.setattr(build, "BuildError", ZeroDivisionError)
    with pytest.raises(OutdatedError, match=f"version {layout.PAGE_VERSION + 1}"):
        open_writer(it.specs[0], "cpu", lambda: 0)
    it.close()


def test_without_a_page_nothing_happens() -> None:
    meter = StepMeter()
    meter.begin([(0, 0, 1, 0, 1, -1)])
    meter.step([0], [1], [True])


def test_numpy_counts_where_there_is_no_compiler(pages: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise build.BuildError("no compiler")

    if build.host_compiler() is not None:
        assert isinstance(open_writer(pages.specs[0], "cpu", lambda: 0), CompiledMeter)
    monkeypatch.setattr(build, "host_library", refuse)
    assert isinstance(open_writer(pages.specs[0], "cpu", lambda: 0), NumpyMeter)


def test_a_gpu_without_cupy(pages: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are on the host are counted there; tensors on the device would have to be waited for."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert isinstance(open_writer(pages.specs[0], "cuda", lambda: 0), (CompiledMeter, NumpyMeter))
    assert open_writer(pages.specs[0], "cuda", lambda: 0, tensors=True) is None


def test_a_gpu_with_cupy(pages: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' writer, on the page in memory that the device can see, on the page's clock."""
    calls: list[object] = []

    class DeviceMeter:
        def __init__(self, page: object, pointer: int) -> None:
            calls.append(pointer)

        def calibrate(self, now_ns: int) -> None:
            calls.append(now_ns)

    module = SimpleNamespace(
        unavailable=lambda: "", DeviceMeter=DeviceMeter, PinnedMemory=lambda page: SimpleNamespace(device_pointer=77)
    )
    monkeypatch.setitem(sys.modules, "a_device", module)
    writer = open_writer({**pages.specs[0], "device_module": "a_device"}, "cuda", lambda: 5)
    assert isinstance(writer, DeviceMeter)
    assert calls == [77, 5]


def test_a_driver_that_does_not_map_the_page(
    pages: Counters, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs the kernels, not the engine."""

    def refuse(page: object) -> object:
        raise RuntimeError("the CUDA driver cannot map host memory into the device: error 1")

    module = SimpleNamespace(unavailable=lambda: "", DeviceMeter=None, PinnedMemory=refuse)
    monkeypatch.setitem(sys.modules, "a_device", module)
    spec = {**pages.specs[0], "device_module": "a_device"}
    assert isinstance(open_writer(spec, "cuda", lambda: 0), (CompiledMeter, NumpyMeter))
    assert open_writer(spec, "cuda", lambda: 0, tensors=True) is None
    assert "cannot map" in caplog.text


def test_the_ring_does_not_overtake_the_kernels(pages: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class DeviceMeter:
        def __init__(self, *_: object) -> None:
            self.calibrate = self.begin = self.step = self._note

        def _note(self, *_: object, **__: object) -> None:
            calls.append("launched")

        def synchronize(self) -> None:
            calls.append("waited")

    module = SimpleNamespace(
        unavailable=lambda: "", DeviceMeter=DeviceMeter, PinnedMemory=lambda page: SimpleNamespace(device_pointer=1)
    )
    monkeypatch.setitem(sys.modules, "a_device", module)
    monkeypatch.setattr(meter_module, "_cuda_stream", contextlib.nullcontext)
    meter = StepMeter({**pages.specs[0], "device_module": "a_device"}, "cuda", lambda: 0)
    meter.begin([])
    meter.step([1], [2], [True])
    assert calls == ["launched", "launched", "launched", "waited"]
