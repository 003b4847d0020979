"""The kernels on a GPU, and a reader of counters that stay in device memory. The only importer of CuPy.

Importing this module needs neither CuPy nor a GPU; `unavailable()` says why it cannot be used. Two set-ups:

- Page and ring lie in shared memory that `PinnedMemory` maps into the device: `DeviceMeter` stores to it; any process
  reads it with `PageReader` and `RingReader`, without CUDA. For engines in a process of their own.
- The page lies in device memory: `CupyReader` copies it on a non-blocking stream of its own into pinned memory, when it
  is asked to. For engines in the same process, and for audits.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from evap.metering import layout
from evap.metering.build import device_code
from evap.metering.page import PageReader, Row, StepLine, format_page
from evap.metering.writer import Join, MeterState

THREADS: Final = 256
_PORTABLE_AND_MAPPED: Final = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP
_DEVICE_TO_HOST: Final = 2
_CUBINS: Final = {"80": "sm_80", "86": "sm_80", "89": "sm_80", "90": "sm_90"}


def unavailable() -> str:
    """Why the device cannot be used from here, in a few words; empty when it can."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as e:
        return f"CuPy is not installed ({e})"
    return "" if cupy.cuda.is_available() else "CuPy sees no CUDA device"


def _cupy() -> Any:
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)
    return importlib.import_module("cupy")


class PinnedMemory:
    """Host memory, locked and mapped into the device's address space while this object lives.

    memory: a writable buffer that stays mapped (an mmap of a file in /dev/shm, a whole number of pages). Raises
    RuntimeError when the driver refuses (RLIMIT_MEMLOCK, or no context: CuPy must have been used in this thread).
    """

    def __init__(self, memory: Any) -> None:
        # The driver's API, not the runtime's: a failure there would stay behind as an error for the next torch call.
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._buffer = (ctypes.c_char * memoryview(memory).nbytes).from_buffer(memory)
        self.address = ctypes.addressof(self._buffer)
        self._check(
            self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(self.address), ctypes.c_size_t(len(self._buffer)), _PORTABLE_AND_MAPPED
            )
        )
        pointer = ctypes.c_uint64()
        self._check(self._driver.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(self.address), 0))
        self.device_pointer = pointer.value

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"the CUDA driver cannot map host memory into the device: error {status}")

    def close(self) -> None:
        """Unmap; only when no kernel that stores to it is running, and before the memory itself is closed."""
        self._check(self._driver.cuMemHostUnregister(ctypes.c_void_p(self.address)))
        del self._buffer


class DeviceMeter:
    """`MeterWriter` by the kernels on the device, for the stream that is CuPy's current one at each call.

    page, ring: host memory that holds the (possibly used) page and ring; page_pointer, ring_pointer: where the device
    finds them (ring_pointer 0: no ring). The time stamps are the device's and `now_ns` is ignored: either the page's
    epoch is a reading of `device_clock_ns`, or `calibrate` is called before the first step.
    """

    def __init__(
        self, page: Any, page_pointer: int, ring: Any = None, ring_pointer: int = 0, capacity: int = 0
    ) -> None:
        self._cupy = _cupy()
        self._host = MeterState(page, ring if ring_pointer else None, capacity)
        module = self._cupy.RawModule(path=str(kernels_for(self._cupy.cuda.Device().compute_capability)))
        names = ("meter_begin", "meter_step", "meter_step_i64")
        self._begin, self._step, self._step_i64 = (module.get_function(name) for name in names)
        self._slots = self._cupy.asarray(self._host.slots.view(np.uint8))
        self._meter = self._cupy.asarray(self._host.meter.view(np.uint8))
        self._count = np.int32(len(self._host.slots))
        self._page, self._ring, self._capacity = np.uint64(page_pointer), np.uint64(ring_pointer), np.uint32(capacity)
        self._joins: Any = None

    def calibrate(self, now_ns: int) -> None:
        """Put the device's stamps on the clock of the page's epoch, which reads `now_ns`. Synchronises the device.

        Good to the time of one small launch and copy (tens of us), less the drift since.
        """
        epoch = int(device_clock_ns()[0]) - (now_ns - int(self._host.page[layout.WORD_EPOCH_DEVICE_NS]))
        at = layout.METER_DTYPE.itemsize - 8  # the last field
        self._meter[at : at + 8] = self._cupy.asarray(np.array([epoch & 0xFFFF_FFFF_FFFF_FFFF], "<u8").view(np.uint8))

    def begin(self, joins: Sequence[Join], now_ns: int = 0) -> None:
        table = np.array(joins, np.int64).reshape(-1, len(layout.JOIN_FIELDS)).astype(np.int32)
        if len(table):
            self._joins = self._cupy.asarray(table)  # kept until the next: the launch is asynchronous
        pointer = self._joins.data.ptr if len(table) else 0
        self._begin(
            (1,),
            (THREADS,),
            (
                np.uint64(pointer),
                np.int32(len(table)),
                self._slot_pointer,
                self._count,
                self._meter_pointer,
                self._page,
            ),
        )

    def step(self, slots: Any, tokens: Any, counts: Any, now_ns: int = 0, *, ring: bool = True) -> None:
        """As MeterWriter says. numpy arrays are copied to the device; torch tensors there are taken."""
        wide = str(tokens.dtype).rpartition(".")[2] == "int64"
        rows, width = tokens.shape
        self._batch = [
            None if a is None else self._cupy.ascontiguousarray(self._cupy.asarray(a, d))
            for a, d in ((slots, np.int32), (tokens, np.int64 if wide else np.int32), (counts, np.int32))
        ]
        pointers = [0 if a is None else a.data.ptr for a in self._batch]
        self.launch(pointers[0], pointers[1], pointers[2], rows, width, wide=wide, ring=ring)

    def synchronize(self) -> None:
        """Wait until the current stream has come so far: what was launched on it is in the page."""
        self._cupy.cuda.get_current_stream().synchronize()

    def launch(
        self, slots: int, tokens: int, counts: int, rows: int, width: int, *, wide: bool, ring: bool = True
    ) -> None:
        """By device pointers, no copies: int32 slots (rows,), int32 or int64 (wide) tokens (rows, width), int32 counts
        or 0. The arrays must live until the stream has passed. Raises ValueError as `step` does."""
        publishes = bool(self._ring) and self._host.publishes(rows, width, ring)
        (self._step_i64 if wide else self._step)(
            (1,),
            (THREADS,),
            (
                np.uint64(slots),
                np.uint64(tokens),
                np.uint64(counts),
                np.int32(rows),
                np.int32(width),
                self._slot_pointer,
                self._count,
                self._meter_pointer,
                self._page,
                self._ring if publishes else np.uint64(0),
                self._capacity,
            ),
        )

    @property
    def _slot_pointer(self) -> np.uint64:
        return np.uint64(self._slots.data.ptr)

    @property
    def _meter_pointer(self) -> np.uint64:
        return np.uint64(self._meter.data.ptr)


def kernels_for(compute_capability: str) -> Path:
    """The file to load on a device of that capability ("90"): a cubin, or PTX for what is newer. Raises BuildError."""
    return device_code(_CUBINS.get(compute_capability, "compute_90" if int(compute_capability) > 90 else "sm_80"))


_CLOCK: Final = r"""
extern "C" __global__ void read_clock(unsigned long long* out, int count) {
    for (int i = 0; i < count; i++) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(out[i]));
}
"""


def device_clock_ns(count: int = 1) -> npt.NDArray[np.uint64]:
    """`count` readings of the device's clock, one after the other. Synchronises; compiles at the first call."""
    cupy = _cupy()
    out = cupy.zeros(count, np.uint64)
    cupy.RawKernel(_CLOCK, "read_clock")((1,), (1,), (np.uint64(out.data.ptr), np.int32(count)))
    return np.asarray(cupy.asnumpy(out), np.uint64)


class CupyReader:
    """A page in device memory, looked at through pinned copies. Same questions as `PageReader`, as of the last copy.

    `refresh` starts a copy unless one is under way, `poll` takes it in when it is there; neither waits. Copies do not
    wait for the engine's stream, so a row may be caught while it is written: that look gives None, as with PageReader.
    """

    def __init__(self, page_pointer: int, slots: int) -> None:
        self._cupy = _cupy()
        self._pointer = page_pointer
        self._bytes = layout.page_bytes(slots)
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._event = self._cupy.cuda.Event()
        self._pinned = [self._cupy.cuda.alloc_pinned_memory(layout.page_bytes(slots)) for _ in range(2)]
        for memory in self._pinned:
            format_page(memory, slots, epoch_device_ns=0, epoch_unix_ns=0)
        self._readers = [PageReader(memory) for memory in self._pinned]
        self._shown = 0
        self._pending = False

    def refresh(self) -> None:
        if self._pending:
            return
        self._cupy.cuda.runtime.memcpyAsync(
            self._pinned[1 - self._shown].ptr, self._pointer, self._bytes, _DEVICE_TO_HOST, self._stream.ptr
        )
        self._event.record(self._stream)
        self._pending = True

    def poll(self) -> bool:
        """True if a copy has come in since the last call."""
        if not self._pending or not self._event.done:
            return False
        self._pending = False
        self._shown = 1 - self._shown
        return True

    def wait(self) -> None:
        """A copy that starts now, waited for."""
        self._stream.synchronize()
        self.poll()
        self.refresh()
        self._stream.synchronize()
        self.poll()

    def heartbeat(self) -> int:
        return self._readers[self._shown].heartbeat()

    def step_line(self) -> StepLine | None:
        return self._readers[self._shown].step_line()

    def row(self, slot: int) -> Row | None:
        return self._readers[self._shown].row(slot)

    def rows(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        return self._readers[self._shown].rows()
