"""The kernels on a real device against the plain model: seen from another process, copied back, in a CUDA graph."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from evap.metering import cupy_reader, layout
from evap.metering.page import PageReader, Row, format_page
from evap.metering.writer import Join
from tests.gpu.conftest import Shared
from tests.metering.reference import EPOCH_NS, Reference


def script(slots: int, steps: int, width: int, seed: int) -> list[tuple[list[Join], Any, Any, Any]]:
    """Random joins, slots, tokens and counts; int64 tokens in every other step."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(steps):
        joining = rng.choice(slots, min(slots, int(rng.integers(0, 9))), replace=False) if n else np.arange(slots)
        joins = [Join(int(s), n % 65536, int(s) + 1, 0, int(rng.integers(1, 40)), 7) for s in joining]
        rows = int(rng.integers(1, slots + 1))
        chosen = rng.permutation(slots)[:rows].astype(np.int32)
        chosen[rng.random(rows) < 0.05] = -1
        tokens = rng.integers(0, 100, (rows, width)).astype(np.int64 if n % 2 else np.int32)
        made.append((joins, chosen, tokens, rng.integers(0, width + 1, rows).astype(np.int32)))
    return made


def without_stamps(row: Any) -> Row | None:
    return Row(*row)._replace(first_us=0, last_us=0) if row is not None else None


@pytest.mark.parametrize(("slots", "width"), [(1, 1), (64, 1), (300, 4), (1024, 2)])
def test_another_process_sees_what_the_model_says(shared: Shared, slots: int, width: int) -> None:
    cupy = pytest.importorskip("cupy")
    steps = script(slots, 40, width, seed=slots)
    reference = Reference(shared.slots)
    for joins, slot_of, tokens, counts in steps:
        reference.begin(joins, EPOCH_NS)
        reference.step(slot_of, tokens, counts, EPOCH_NS)
    command = [sys.executable, "-m", "tests.gpu.observer", str(shared.path)]
    command += [str(n) for n in (shared.slots, shared.capacity, shared.ring_at, len(reference.records))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as observer:
        assert observer.stdout is not None
        assert observer.stdin is not None
        assert observer.stdout.readline() == "ready\n"
        meter, stream = shared.meter(), cupy.cuda.get_current_stream()
        for n, (joins, slot_of, tokens, counts) in enumerate(steps):
            meter.begin(joins)
            meter.step(slot_of, tokens, counts)
            if n % 4 == 3:  # the device waits for nobody, and this test wants every record
                stream.synchronize()
                while not shared.drained() and observer.poll() is None:
                    time.sleep(0.001)
        stream.synchronize()
        observer.stdin.write("synchronised\n")
        observer.stdin.flush()
        said = json.loads(observer.stdout.readline())
    assert said["lost"] == 0
    assert [tuple(r) for r in said["records"]] == reference.records
    for slot, account in reference.accounts.items():
        assert without_stamps(said["rows"][str(slot)]) == without_stamps(account.row())
    line, expected = said["line"], reference.step_line()
    names = layout.STEP_FIELDS
    for name in ("step", "records", "computed", "emitted", "rows"):
        assert line[names.index(name)] == getattr(expected, name)
    assert line[names.index("begin_us")] <= line[names.index("end_us")]


def test_a_reader_in_the_same_process_copies_device_memory() -> None:
    cupy = pytest.importorskip("cupy")
    slots = 64
    host = bytearray(layout.page_bytes(slots))
    epoch = int(cupy_reader.device_clock_ns()[0])
    format_page(host, slots, epoch_device_ns=epoch, epoch_unix_ns=0)
    device = cupy.asarray(np.frombuffer(host, np.uint8))
    meter = cupy_reader.DeviceMeter(host, device.data.ptr)
    reader, reference = cupy_reader.CupyReader(device.data.ptr, slots), Reference(slots)
    both: list[Any] = [meter, reference]
    for joins, slot_of, tokens, counts in script(slots, 20, 3, seed=5):
        for one in both:
            one.begin(joins, EPOCH_NS)
            one.step(slot_of, tokens, counts, EPOCH_NS)
    meter.synchronize()
    reader.wait()
    assert reader.heartbeat() == 20
    for slot, account in reference.accounts.items():
        row = reader.row(slot)
        assert without_stamps(row) == without_stamps(account.row())
        assert row is not None
        assert row.first_us <= row.last_us


def test_kernels_in_a_captured_graph_count_at_each_replay(shared: Shared) -> None:
    cupy = pytest.importorskip("cupy")
    meter, stream = shared.meter(), cupy.cuda.Stream(non_blocking=True)
    rows, replays = 8, 25
    slots, tokens = cupy.arange(rows, dtype=np.int32), cupy.zeros((rows, 1), np.int32)
    cupy.cuda.Device().synchronize()
    with stream:
        meter.begin([Join(s, 1, 5) for s in range(rows)])
        meter.launch(slots.data.ptr, tokens.data.ptr, 0, rows, 1, wide=False)  # loads the module before capture
        stream.synchronize()
        stream.begin_capture()
        meter.begin([])
        meter.launch(slots.data.ptr, tokens.data.ptr, 0, rows, 1, wide=False)
        graph = stream.end_capture()
        for _ in range(replays):
            graph.launch(stream)
        stream.synchronize()
    reader = PageReader(shared.page)
    line = reader.step_line()
    assert line is not None
    assert (line.step, line.computed) == (replays + 1, (replays + 1) * rows)
    stamps = [reader.row(s) for s in range(rows)]
    assert {row.computed for row in stamps if row is not None} == {replays + 1}


def test_the_device_clock_only_goes_forward() -> None:
    readings = cupy_reader.device_clock_ns(1000).astype(np.int64)
    assert (np.diff(readings) >= 0).all()
