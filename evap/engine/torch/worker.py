"""The engine's process: `python -m evap.engine.torch.worker SOCKET RING DOORBELL` (inherited descriptors).

Its loop reads as three lines: take commands, step, publish. It ends when its parent does (if other processes use it,
when the last of them does), when the socket closes, on Stop, and when anything goes wrong that is not one request's
fault; it never outlives an error in an unknown state.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from evap.engine.meter import SharedMeter, Spec, StepMeter
from evap.engine.torch import wire
from evap.engine.torch.links import FULL_RING_S, SLOT_MASK, Link, Links, Patience, give_up, publish_all
from evap.engine.torch.records import Records
from evap.errors import OutdatedError, StartupError
from evap.messages import EngineInfo, GenerateRequest

_PR_SET_PDEATHSIG: Final = 1


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
    def beats(self, beat: Callable[[], None]) -> None:
        """Call `beat` whenever a part of a step is computed: a step may take minutes."""
        ...

    def attach(self, base: int, meter: Spec | None) -> None:
        """Another process submits from now on, with `base` added to its slots, and has this page for them."""
        ...

    def detach(self, base: int) -> None:
        """It is gone; what it had submitted is cancelled."""
        ...

    def step(self) -> Records: ...
    def pace(self, elapsed_ns: int) -> None:
        """How long the last step took, before the next."""
        ...

    def is_out_of_memory(self, error: Exception) -> bool: ...
    def relieve(self) -> None:
        """After an out-of-memory: give up one request, so that it cannot go on for ever."""
        ...


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
    engine.meter = SharedMeter(
        lambda spec: StepMeter(spec, loaded.device.type, time.monotonic_ns), boot.meter, SLOT_MASK
    )  # fmt: skip
    return engine


def serve(link: Link, build: Build) -> None:
    """Boot from the first message, then run until Stop or the end of the socket (EOFError)."""
    boot = link.boot()
    link.open_ring(boot.ring_capacity)
    engine = build(boot, lambda line: link.send(wire.Progress(line)))
    link.send(wire.Ready(engine.info))
    with contextlib.closing(Links(link, Linger())) as links:
        run(engine, links)


def run(engine: Core, links: Links) -> None:
    """Take commands, step, publish."""
    patience = Patience()
    engine.beats(links.beat)
    while True:
        for link, message in links.receive(wait=engine.idle):
            if isinstance(message, wire.Stop):
                return
            _obey(message, engine, link, links)
        if patience.crowded(engine, links):
            time.sleep(FULL_RING_S)  # a reader is behind: a step now could overrun it
        elif not engine.idle:
            begin = time.monotonic_ns()
            links.tell_step(begin)
            records = _step(engine)
            links.tell_step(0)
            engine.pace(time.monotonic_ns() - begin)
            links.tell_kv_usage(engine.kv_usage)
            publish_all(records, engine.steps, links)


def _obey(message: wire.ToWorker | None, engine: Core, link: Link, links: Links) -> None:
    match message:
        case wire.Submit():
            link.live[message.slot] = message.generation
            engine.submit(link.base + message.slot, message.generation, wire.unpack_request(message))
        case wire.Cancel():
            engine.cancel(link.base + message.slot, message.generation)
        case wire.Attach():
            engine.attach(links.attach(message.ring_capacity), message.meter)
            links.linger(message.linger_s)
        case None:
            give_up(engine, link, links)


def _step(engine: Core) -> Records | None:
    try:
        return engine.step()
    except Exception as error:
        if not engine.is_out_of_memory(error):
            raise
        # One request is given up for each time this happens, so it ends.
        engine.relieve()
        return None


def _die_with_parent() -> None:
    """SIGKILL when the parent ends. Signals to a whole group (^C, a service manager) are the parent's to act on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Linger:
    """Called with the seconds that the engine may outlive its parent: at first it is killed together with it.

    Then it ends with its last user, and by SIGALRM if that takes longer, or if it hangs: nothing stays behind.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._seconds = 0.0

    def __call__(self, seconds: float) -> None:
        first, self._seconds = not self._seconds, seconds
        if first and seconds:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            threading.Thread(target=self._wait, name="evap-linger", daemon=True).start()
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0)

    def _wait(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            fd = os.pidfd_open(self._parent)
            select.select([fd], [], [])
        signal.setitimer(signal.ITIMER_REAL, self._seconds)


def main(argv: list[str], build: Build = build) -> int:
    """Exit status 0 after Stop, 1 after an error (reported as Fatal), 2 when nobody is left."""
    _die_with_parent()
    link = Link(*map(int, argv))
    try:
        return _serve(link, build)
    finally:
        link.close()


def _serve(link: Link, build: Build) -> int:
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
            link.send(wire.Fatal(message[:1000], remedy, isinstance(error, OutdatedError)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
