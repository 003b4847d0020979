"""The engine's process: `python -m evap.engine.torch.worker SOCKET RING DOORBELL` (inherited descriptors).

Its loop reads as three lines: take commands, step, publish. It ends when its parent does, when the socket closes, on
Stop, and when anything goes wrong that is not one request's fault; it never outlives an error in an unknown state.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from evap.engine.meter import StepMeter
from evap.engine.torch import wire
from evap.engine.torch.records import Records
from evap.errors import StartupError
from evap.messages import EngineInfo, GenerateRequest
from evap.ring import RingWriter, ring_bytes

_PR_SET_PDEATHSIG: Final = 1
_READ_BYTES: Final = 1 << 20
#: Between looks at a ring that is too full for the next step.
_FULL_RING_S: Final = 0.001


class Core(Protocol):
    """What the loop needs of an engine."""

    steps: int

    @property
    def info(self) -> EngineInfo: ...
    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing to publish."""
        ...

    @property
    def bound(self) -> int:
        """Most records that the next `step` computes. It returns those that are pending as well."""
        ...

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that generations hold now, 0..1."""
        ...

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None: ...
    def cancel(self, slot: int, generation: int) -> None: ...
    def step(self) -> Records: ...
    def pace(self, elapsed_ns: int) -> None:
        """How long the last step took, before the next."""
        ...

    def is_out_of_memory(self, error: Exception) -> bool: ...
    def relieve(self) -> None:
        """After an out-of-memory: give up one request, so that it cannot go on for ever."""
        ...


class Link:
    """The worker's ends of socket, ring and doorbell. Writes block; reads block only when asked to."""

    def __init__(self, sock: int, memory: int, bell: int) -> None:
        self._sock, self._memory, self._bell = sock, memory, bell
        self._frames = wire.to_worker()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._early: list[wire.ToWorker] = []

    def open_ring(self, capacity: int) -> RingWriter:
        return RingWriter(mmap.mmap(self._memory, ring_bytes(capacity)), capacity)

    def boot(self) -> wire.Boot:
        """The first message."""
        first, *self._early = self.receive(wait=True)
        if not isinstance(first, wire.Boot):
            raise EOFError
        return first

    def receive(self, *, wait: bool) -> list[wire.ToWorker]:
        """Messages that are there; if `wait`, at least one. Raises EOFError when the parent has closed."""
        messages, self._early = self._early, []
        while self._poll.poll(None if wait and not messages else 0):
            data = os.read(self._sock, _READ_BYTES)
            if not data:
                raise EOFError
            messages += self._frames.feed(data)
        return messages

    def send(self, message: wire.FromWorker) -> None:
        data = memoryview(wire.frame(message))
        while data:
            data = data[os.write(self._sock, data) :]

    def ring_bell(self) -> None:
        os.eventfd_write(self._bell, 1)


Build = Callable[[wire.Boot, Callable[[str], None]], Core]


def build(boot: wire.Boot, progress: Callable[[str], None]) -> Core:
    """The real engine. Torch takes seconds to import, so that happens here and not at the top."""
    progress("loading torch")
    from evap.engine.torch.engine import Engine  # noqa: PLC0415
    from evap.engine.torch.load import load, room_for  # noqa: PLC0415

    loaded = load(boot.config, Path(boot.model_path), progress)
    engine = Engine(loaded, max_running=boot.config.max_running, prefill_chunk=boot.config.prefill_chunk)
    progress("warming up")
    with room_for("the first step", "lower --kv-cache-mb, --prefill-chunk or --max-running"):
        engine.warm_up()
    engine.meter = StepMeter(boot.meter, loaded.device.type, time.monotonic_ns)
    return engine


def serve(link: Link, build: Build) -> None:
    """Boot from the first message, then run until Stop or the end of the socket (EOFError)."""
    boot = link.boot()
    engine = build(boot, lambda line: link.send(wire.Progress(line)))
    ring = link.open_ring(boot.ring_capacity)
    link.send(wire.Ready(engine.info))
    run(engine, ring, link)


def run(engine: Core, ring: RingWriter, link: Link) -> None:
    """Take commands, step, publish."""
    while True:
        for message in link.receive(wait=engine.idle):
            if isinstance(message, wire.Stop):
                return
            _obey(message, engine)
        if ring.room() < engine.bound:
            time.sleep(_FULL_RING_S)  # the reader is behind: a step now could overrun it
        elif not engine.idle:
            begin = time.monotonic_ns()
            records = _step(engine)
            engine.pace(time.monotonic_ns() - begin)
            ring.tell_kv_usage(engine.kv_usage)
            publish(records, engine.steps, ring, link)


def _obey(message: wire.ToWorker, engine: Core) -> None:
    match message:
        case wire.Submit():
            engine.submit(message.slot, message.generation, wire.unpack_request(message))
        case wire.Cancel():
            engine.cancel(message.slot, message.generation)


def _step(engine: Core) -> Records | None:
    try:
        return engine.step()
    except Exception as error:
        if not engine.is_out_of_memory(error):
            raise
        # One request is given up for each time this happens, so it ends.
        engine.relieve()
        return None


def publish(records: Records | None, step: int, ring: RingWriter, link: Link) -> None:
    """Log probabilities, records, doorbell: in this order, so that a reader of the ring finds the first there.

    One doorbell, unless a mass of cancels does not fit the ring at once: the rest waits for the reader then.
    """
    if records is None:
        return
    if records.logprobs:
        link.send(wire.LogprobBatch(records.logprobs))
    done = 0
    while done < len(records):
        part = slice(done, done + ring.room())
        if part.start == part.stop:
            time.sleep(_FULL_RING_S)
            continue
        slot, generation, token = records.slot[part], records.generation[part], records.token[part]
        ring.write(slot, generation, token, records.index[part], records.flags[part], step)
        link.ring_bell()
        done = part.stop


def _die_with_parent() -> None:
    """SIGKILL when the parent ends. Signals to a whole group (^C, a service manager) are the parent's to act on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: list[str], build: Build = build) -> int:
    """Exit status 0 after Stop, 1 after an error (reported as Fatal), 2 when the parent is gone."""
    _die_with_parent()
    link = Link(*map(int, argv))
    try:
        serve(link, build)
    except (EOFError, BrokenPipeError):
        return 2
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent hears of it and the process ends
        startup = isinstance(error, StartupError)
        if not startup:
            traceback.print_exc()
        remedy = error.remedy if isinstance(error, StartupError) else ""
        message = str(error) if startup else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            link.send(wire.Fatal(message[:1000], remedy))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
