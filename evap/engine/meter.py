"""The engine's side of metering: a writer of its counters page, in the engine's own process.

Engines know nothing of metering: `Spec` names the page and the modules that write it, and the server fills it in. A
writer's `begin` is called before a forward pass with the generations that are new, its `step` right after sampling, and
what it has written is seen by the server before any token of the step is.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from evap.errors import OutdatedError

logger = logging.getLogger("evap.engine.meter")
#: page: path of the page's file; module, build_module, device_module: who writes it
Spec: TypeAlias = dict[str, str]
Ints: TypeAlias = npt.NDArray[np.int32]


def map_file(path: str | Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def open_writer(spec: Spec, device: str, now_ns: Callable[[], int], *, tensors: bool = False) -> Any | None:
    """Kernels on a GPU, their host build elsewhere, numpy without a compiler.

    tensors: tokens will come as the device's own tensors; then nobody but the kernels can count them, and where those
    cannot run (no CuPy, a driver that does not map the page) the result is None. Raises OutdatedError for a page that
    another version has made.
    """
    page = map_file(spec["page"])
    try:
        return _open(spec, page, device, now_ns, tensors=tensors)
    except ValueError as error:
        raise OutdatedError(error) from error


def _open(spec: Spec, page: mmap.mmap, device: str, now_ns: Callable[[], int], *, tensors: bool) -> Any | None:
    if device == "cuda":
        reader = importlib.import_module(spec["device_module"])
        reason = reader.unavailable()
        try:
            if not reason:
                meter = reader.DeviceMeter(page, reader.PinnedMemory(page).device_pointer)
                meter.calibrate(now_ns())
                return meter
        except (RuntimeError, OSError) as error:
            reason = str(error)
        logger.warning("no kernel counts tokens on this GPU: %s", reason)
        if tensors:
            return None
    writers, build = importlib.import_module(spec["module"]), importlib.import_module(spec["build_module"])
    try:
        return writers.CompiledMeter(build.host_library(), page)
    except (build.BuildError, OSError):
        return writers.NumpyMeter(page)


def stream_of(writer: Any) -> Callable[[], Any]:
    """What a writer's calls must be made in: kernels go to torch's current stream."""
    return _cuda_stream if hasattr(writer, "calibrate") else contextlib.nullcontext


def _cuda_stream() -> Any:
    """torch's current stream as CuPy's current one."""
    cupy, torch = importlib.import_module("cupy"), importlib.import_module("torch")
    return cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)


class StepMeter:
    """A page's writer with the clock and the stream that go with it. Without a spec it does nothing."""

    def __init__(self, spec: Spec | None = None, device: str = "cpu", now_ns: Callable[[], int] = lambda: 0) -> None:
        self._writer = open_writer(spec, device, now_ns) if spec is not None else None
        self._now_ns = now_ns
        self._stream = stream_of(self._writer)
        # Kernels: tens of us, so that the page has the step before the ring does.
        self._wait: Callable[[], object] = getattr(self._writer, "synchronize", lambda: None)

    def begin(self, joins: Sequence[tuple[int, int, int, int, int, int]]) -> None:
        """joins: (slot, generation, prompt tokens, those that were cached, most tokens, end token or -1) of each."""
        if self._writer is not None:
            with self._stream():
                self._writer.begin(joins, self._now_ns())

    def step(self, slots: Sequence[int], tokens: Sequence[int], counts: Sequence[int]) -> None:
        """Everything that the step computed: for each slot a token, which counts 1, or 0 for a part of a prefill."""
        if self._writer is not None:
            table = np.array(tokens, np.int32)[:, None]
            with self._stream():
                self._writer.step(
                    np.array(slots, np.int32), table, np.array(counts, np.int32), self._now_ns(), ring=False
                )
                self._wait()


class SharedMeter:
    """The meter of an engine that several processes use: each has a page of its own, with its own slots.

    Other processes' slots come with a base added (`torch/links.py`), of which `mask` has the bits of the slot itself.
    """

    def __init__(self, make: Callable[[Spec | None], StepMeter], own: Spec | None, mask: int) -> None:
        self._make, self._mask = make, mask
        self._own = make(own)
        self._of: dict[int, StepMeter] = {}

    def attach(self, base: int, spec: Spec | None) -> None:
        self._of[base] = self._make(spec)

    def detach(self, base: int) -> None:
        self._of.pop(base, None)

    def begin(self, joins: Sequence[tuple[int, int, int, int, int, int]]) -> None:
        """As StepMeter's."""
        if not self._of:
            self._own.begin(joins)
            return
        split: dict[int, list[tuple[int, int, int, int, int, int]]] = {}
        for join in joins:
            split.setdefault(join[0] & ~self._mask, []).append((join[0] & self._mask, *join[1:]))
        for base, part in split.items():
            self._meter(base).begin(part)

    def step(self, slots: Sequence[int], tokens: Sequence[int], counts: Sequence[int]) -> None:
        """As StepMeter's."""
        if not self._of:
            self._own.step(slots, tokens, counts)
            return
        split: dict[int, list[tuple[int, int, int]]] = {}
        for slot, token, count in zip(slots, tokens, counts, strict=True):
            split.setdefault(slot & ~self._mask, []).append((slot & self._mask, token, count))
        for base, part in split.items():
            self._meter(base).step(*map(list, zip(*part, strict=True)))

    def _meter(self, base: int) -> StepMeter:
        """A process that has just gone has none; its slots are nobody's."""
        return self._of.get(base) or (_NONE if base else self._own)


_NONE = StepMeter()
