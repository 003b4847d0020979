"""What metering on a GPU costs and how soon its counters are seen. Needs a CUDA device and CuPy.

    python -m bench.gpu_meter                 a table
    python -m bench.gpu_meter --json out.json

visible_us      from the launch of a step until another process has parsed its counter, by polling shared memory
synchronize_us  from the same launch until event.synchronize() returns: what a reader without shared memory waits for
launch_us       host time of meter_begin + meter_step (CuPy), arguments already on the device
device_us       device time of the two kernels, from events over many launches; in_graph_us: as nodes of a CUDA graph
copy_us         from refresh() of the copying reader until its row is there, device idle, and busy with matrix products
clock_step_ns   least step of the device's clock between two readings
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import emit, machine, say, versions
from evap.metering import cupy_reader, layout
from evap.metering.page import PageReader, format_page
from evap.metering.writer import Join
from evap.ring import format_ring, ring_bytes

SLOTS, CAPACITY = 1024, 1 << 14
ROWS = (1, 64, 512)
REPEATS = 2000


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * q))], 3)
            for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}  # fmt: skip


@contextmanager
def shared_meter(cupy: Any) -> Iterator[tuple[Path, Any, int]]:
    """A page and a ring in /dev/shm, mapped into the device, and the meter that writes them."""
    ring_at = -(-layout.page_bytes(SLOTS) // mmap.PAGESIZE) * mmap.PAGESIZE
    size = ring_at + -(-ring_bytes(CAPACITY) // mmap.PAGESIZE) * mmap.PAGESIZE
    path = Path("/dev/shm") / f"evap-bench-{os.getpid()}"
    path.write_bytes(bytes(size))
    try:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        view = memoryview(memory)
        format_page(view[:ring_at], SLOTS, epoch_device_ns=int(cupy_reader.device_clock_ns()[0]), epoch_unix_ns=0)
        format_ring(view[ring_at:], CAPACITY)
        pinned = cupy_reader.PinnedMemory(memory)
        pointer = pinned.device_pointer
        yield (
            path,
            cupy_reader.DeviceMeter(view[:ring_at], pointer, view[ring_at:], pointer + ring_at, CAPACITY),
            ring_at,
        )
        cupy.cuda.Device().synchronize()
        pinned.close()
    finally:
        path.unlink()


def watch(path: str, ring_at: int, steps: int, pipe: Connection) -> None:
    """The other process: when each step was first seen, in ns of CLOCK_MONOTONIC."""
    with Path(path).open("r+b") as file:
        reader = PageReader(memoryview(mmap.mmap(file.fileno(), 0))[:ring_at])
    seen = np.zeros(steps + 1, np.int64)
    pipe.send("ready")
    last = 0
    while last < steps:
        now = reader.heartbeat()
        if now > last:
            reader.row(0)  # parsed, not only noticed
            seen[last + 1 : now + 1] = time.monotonic_ns()
            last = now
    pipe.send(seen)


def batch(cupy: Any, rows: int) -> tuple[Any, Any]:
    return cupy.arange(rows, dtype=np.int32), cupy.zeros((rows, 1), np.int32)


def visible(cupy: Any, rows: int) -> dict[str, Any]:
    with shared_meter(cupy) as (path, meter, ring_at):
        slots, tokens = batch(cupy, rows)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=watch, args=(str(path), ring_at, REPEATS, theirs))
        process.start()
        ours.recv()
        event = cupy.cuda.Event(block=False)
        launched, synchronised = np.zeros(REPEATS, np.int64), np.zeros(REPEATS, np.int64)
        for n in range(REPEATS):
            launched[n] = time.monotonic_ns()
            meter.begin([])
            meter.launch(slots.data.ptr, tokens.data.ptr, 0, rows, 1, wide=False)
            event.record()
            event.synchronize()
            synchronised[n] = time.monotonic_ns()
        seen = ours.recv()[1:]
        process.join()
    warm = slice(REPEATS // 10, None)
    return {
        "visible_us": percentiles(((seen - launched)[warm] / 1e3).tolist()),
        "synchronize_us": percentiles(((synchronised - launched)[warm] / 1e3).tolist()),
    }


def costs(cupy: Any, rows: int) -> dict[str, Any]:
    with shared_meter(cupy) as (_, meter, _):
        slots, tokens = batch(cupy, rows)

        def once() -> None:
            meter.begin([])
            meter.launch(slots.data.ptr, tokens.data.ptr, 0, rows, 1, wide=False)

        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            meter.begin([Join(s, 1, 1) for s in range(rows)])
            once()
            stream.synchronize()
            host = []
            for n in range(REPEATS):
                start = time.perf_counter_ns()
                once()
                host.append((time.perf_counter_ns() - start) / 1e3)
                if n % 100 == 0:
                    stream.synchronize()
            plain = device_time(cupy, stream, once, 200)
            stream.begin_capture()
            for _ in range(10):
                once()
            graph = stream.end_capture()
            in_graph = device_time(cupy, stream, lambda: graph.launch(stream), 20) / 10
    return {"launch_us": percentiles(host), "device_us": round(plain, 3), "in_graph_us": round(in_graph, 3)}


def device_time(cupy: Any, stream: Any, launch: Callable[[], None], count: int) -> float:
    """Microseconds per launch, by events round many of them; the median of five."""
    found = []
    for _ in range(5):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        launch()
        start.record(stream)
        for _ in range(count):
            launch()
        end.record(stream)
        end.synchronize()
        found.append(float(cupy.cuda.get_elapsed_time(start, end)) * 1e3 / count)
    return statistics.median(found)


def copies(cupy: Any) -> dict[str, Any]:
    host = bytearray(layout.page_bytes(SLOTS))
    format_page(host, SLOTS, epoch_device_ns=0, epoch_unix_ns=0)
    device = cupy.asarray(np.frombuffer(host, np.uint8))
    meter = cupy_reader.DeviceMeter(host, device.data.ptr)
    meter.begin([Join(0, 1, 1)])
    reader = cupy_reader.CupyReader(device.data.ptr, SLOTS)
    cupy.cuda.Device().synchronize()
    work = cupy.ones((4096, 4096), np.float32)
    found = {}
    for state in ("idle", "busy"):
        taken = []
        for n in range(REPEATS // 4):
            if state == "busy" and n % 20 == 0:
                cupy.cuda.get_current_stream().synchronize()
                for _ in range(20):
                    cupy.matmul(work, work)
            start = time.perf_counter_ns()
            reader.refresh()
            while not reader.poll():
                pass
            reader.row(0)
            taken.append((time.perf_counter_ns() - start) / 1e3)
        cupy.cuda.Device().synchronize()
        found[state] = percentiles(taken)
    return found


def clock_step_ns() -> int:
    steps = np.diff(cupy_reader.device_clock_ns(20_000).astype(np.int64))
    return int(steps[steps > 0].min())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_meter", description="Cost and latency of GPU metering.")
    parser.add_argument("--json", metavar="FILE", help="where to write the result; - for standard output")
    parser.add_argument("--quick", action="store_true", help="accepted as by every bench; this one is quick anyway")
    options = parser.parse_args()
    reason = cupy_reader.unavailable()
    if reason:
        say(f"bench.gpu_meter: skipped, it needs a CUDA device: {reason}")
        return 0 if options.quick else 2  # a smoke run on a machine without one is no failure
    import cupy  # noqa: PLC0415  (only where there is one)

    document: dict[str, Any] = {
        "bench": "gpu_meter",
        "machine": machine(),
        "versions": versions("cupy-cuda13x", "numpy"),
    }
    document["device"] = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    document["rows"] = []
    for rows in ROWS:
        row = {"rows": rows, **visible(cupy, rows), **costs(cupy, rows)}
        say(str(row))
        document["rows"].append(row)
    document["copy_us"] = copies(cupy)
    document["clock_step_ns"] = clock_step_ns()
    say(f"copies {document['copy_us']}, clock step {document['clock_step_ns']} ns")
    if options.json:
        emit(document, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
