"""The GPU side without a GPU: arguments, copies and refusals. Kernels on a real device are in tests/gpu."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evap.metering import build, cupy_reader, layout
from evap.metering.cupy_reader import CupyReader, DeviceMeter, kernels_for, unavailable
from evap.metering.page import PageReader
from evap.metering.writer import Join
from evap.ring import RingReader
from tests.metering.fake_cupy import FakeCupy
from tests.metering.reference import EPOCH_NS, Reference, int32, new_memory, records_of

SLOTS, CAPACITY = 4, 32


def address(memory: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))


@pytest.fixture
def cupy(host_library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy(host_library)
    monkeypatch.setattr(cupy_reader, "importlib", type("", (), {"import_module": staticmethod(lambda name: fake)}))
    monkeypatch.setattr(cupy_reader, "device_code", Path)
    return fake


def test_the_module_imports_without_cupy_and_says_why_it_cannot_work() -> None:
    code = "import sys, evap.metering.cupy_reader as m; print(m.unavailable()); sys.exit('cupy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    try:
        importlib.import_module("cupy")
    except ImportError:
        assert (done.returncode, done.stdout.strip()[:21]) == (0, "CuPy is not installed")
    else:
        assert done.returncode == 1  # it was imported to ask


def test_without_a_device_using_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if not unavailable():
        pytest.skip("this machine has a CUDA device")
    page, _ = new_memory(SLOTS, CAPACITY)
    with pytest.raises(RuntimeError, match="CuPy"):
        DeviceMeter(page, 0)
    with pytest.raises(RuntimeError, match="CuPy"):
        CupyReader(0, SLOTS)


def test_launches_do_what_the_model_does(cupy: FakeCupy) -> None:
    page, ring = new_memory(SLOTS, CAPACITY)
    meter, reference = DeviceMeter(page, address(page), ring, address(ring), CAPACITY), Reference(SLOTS)
    for n, dtype in enumerate((np.int32, np.int64, np.int32)):
        joins = [Join(s, n, 10 + s, s, 5, 3) for s in range(n, 3)]
        slots, tokens, counts = int32([0, -1, 2, 1], (4,)), np.array([[1, 3], [9, 9], [4, 5], [3, 1]], dtype), None
        if n:
            counts = int32([2, 2, 1, 0], (4,))
        now = EPOCH_NS + n * 1_000_000
        for one in (meter, reference):
            both: Any = one
            cupy.clock_ns = now
            both.begin(joins, now)
            cupy.clock_ns = now + 5_000
            both.step(slots, tokens, counts, now + 5_000, ring=n != 1)
    reader = PageReader(page)
    assert {s: reader.row(s) for s in range(3)} == reference.history[-1]
    assert reader.step_line() == reference.step_line()
    assert records_of(RingReader(ring, CAPACITY).poll()) == reference.records


def test_stamps_are_put_on_the_clock_of_the_page(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    page, _ = new_memory(SLOTS, 1)
    meter = DeviceMeter(page, address(page))
    cupy.clock_ns = 50_000_000_000
    monkeypatch.setattr(cupy_reader, "device_clock_ns", lambda: np.array([cupy.clock_ns], np.uint64))
    meter.calibrate(EPOCH_NS + 3_000_000)
    cupy.clock_ns += 1_000_000
    meter.begin([Join(0, 1, 5)])
    meter.step(int32([0], (1,)), int32([7], (1, 1)), None)
    row = PageReader(page).row(0)
    assert row is not None
    assert row.first_us == 4000
    assert layout.METER_DTYPE.names is not None
    assert layout.METER_DTYPE.names[-1] == "epoch_ns"


def test_a_ring_that_one_step_could_lap_is_refused(cupy: FakeCupy) -> None:
    page, ring = new_memory(SLOTS, 4)
    meter = DeviceMeter(page, address(page), ring, address(ring), 4)
    with pytest.raises(ValueError, match="do not fit"):
        meter.step(int32([0], (1,)), int32([1] * 5, (1, 5)), None)
    DeviceMeter(page, address(page)).step(int32([0], (1,)), int32([1] * 5, (1, 5)), None)


def test_the_reader_shows_the_last_copy(cupy: FakeCupy) -> None:
    device, _ = new_memory(SLOTS, 1)
    meter, reader = DeviceMeter(device, address(device)), CupyReader(address(device), SLOTS)
    assert (reader.row(0), reader.step_line(), reader.heartbeat(), reader.poll()) == (None, None, 0, False)
    meter.begin([Join(0, 1, 5)])
    reader.refresh()
    reader.refresh()  # one is under way
    assert len(cupy.copies) == 1
    meter.step(int32([0], (1,)), int32([7], (1, 1)), None)
    assert not reader.poll()
    cupy.finish()
    assert reader.poll()
    assert not reader.poll()
    assert reader.heartbeat() == 1
    row = reader.row(0)
    assert row is not None
    assert (row.prompt, row.computed) == (5, 1)
    meter.step(int32([0], (1,)), int32([7], (1, 1)), None)
    assert reader.heartbeat() == 1
    reader.wait()
    line = reader.step_line()
    assert line is not None
    assert (line.step, line.computed) == (2, 2)
    values, whole = reader.rows()
    assert whole.tolist() == [True, False, False, False]
    assert values[0, layout.ROW_FIELDS.index("computed")] == 2


@pytest.mark.parametrize(
    ("capability", "file"),
    [("80", "sm_80"), ("89", "sm_80"), ("90", "sm_90"), ("100", "compute_90"), ("120", "compute_90")],
)
def test_each_device_gets_code_that_it_can_load(cupy: FakeCupy, capability: str, file: str) -> None:
    assert kernels_for(capability) == Path(file)
    assert file in build.ARCHITECTURES


def test_host_memory_is_mapped_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    status = 0

    class Driver:
        def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:
            calls.append(("register", address.value, size.value, flags))
            return status

        def cuMemHostGetDevicePointer_v2(self, out: Any, address: Any, flags: int) -> int:
            out._obj.value = address.value + 64
            return 0

        def cuMemHostUnregister(self, address: Any) -> int:
            calls.append(("unregister", address.value))
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    memory = bytearray(4096)
    pinned = cupy_reader.PinnedMemory(memory)
    where = address(memory)
    assert pinned.device_pointer == where + 64
    pinned.close()
    assert calls == [("register", where, 4096, 3), ("unregister", where)]
    status = 2
    with pytest.raises(RuntimeError, match="error 2"):
        cupy_reader.PinnedMemory(memory)
