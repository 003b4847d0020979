"""CuPy as far as cupy_reader.py uses it, on the CPU: device memory is host memory, kernels are the host build's.

It shows that arguments are packed in the kernels' order and types. It says nothing about a GPU; tests/gpu does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

#: What each kernel takes, as the source declares it.
KINDS = {
    "meter_begin": (np.uint64, np.int32, np.uint64, np.int32, np.uint64, np.uint64),
    "meter_step": (*(np.uint64,) * 3, *(np.int32,) * 2, np.uint64, np.int32, *(np.uint64,) * 3, np.uint32),
}
KINDS["meter_step_i64"] = KINDS["meter_step"]


class Array(np.ndarray[Any, Any]):
    """numpy's, with CuPy's `data.ptr`."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def array(values: Any, dtype: Any = None) -> Array:
    return np.array(values, dtype).view(Array)  # always a copy, as to a device


class Pinned(bytearray):
    @property
    def ptr(self) -> int:
        return ctypes.addressof((ctypes.c_char * len(self)).from_buffer(self))


class Event:
    """Done when the test says so."""

    done = False

    def record(self, stream: Any) -> None:
        self.done = False


class FakeCupy:
    """The module. `clock_ns` is the device's clock; copies happen when `finish` is called."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.evap_clock.argtypes = [ctypes.c_uint64]
        self.clock_ns = 0
        self.copies: list[tuple[int, int, int]] = []
        self.events: list[Event] = []
        self.asarray = self.ascontiguousarray = array
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            Device=lambda: SimpleNamespace(compute_capability="90"),
            Stream=lambda non_blocking: SimpleNamespace(ptr=0, synchronize=self.finish),
            Event=self._event,
            alloc_pinned_memory=Pinned,
            runtime=SimpleNamespace(memcpyAsync=self._copy),
        )

    def RawModule(self, path: str) -> Any:
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            assert tuple(type(a) for a in arguments) == KINDS[name]
            assert (grid, len(block)) == ((1,), 1)
            self.library.evap_clock(self.clock_ns)
            packed = [ctypes.c_void_p(int(a)) if isinstance(a, np.uint64) else int(a) for a in arguments]
            getattr(self.library, f"evap_{name}")(1, *packed)

        return launch

    def _event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def _copy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind == 2
        self.copies.append((to, source, size))

    def finish(self) -> None:
        for to, source, size in self.copies:
            ctypes.memmove(to, source, size)
        self.copies.clear()
        for event in self.events:
            event.done = True
