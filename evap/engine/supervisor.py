"""An engine in a process of its own: start, feed, watch, restart, end. The generic half knows no model.

`Worker` is one life of a process: a channel to it (`channel.py`) and a pidfd. `TorchReplica` is a Replica over a
succession of Workers. Everything runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from evap.child import Child, describe_end, pause_s
from evap.config import EngineConfig
from evap.engine import defaults
from evap.engine.channel import Channel, RingReplica, capacity_for, open_fds
from evap.engine.interface import Hand
from evap.engine.meter import Spec
from evap.engine.torch import wire
from evap.errors import StartupError
from evap.messages import EngineInfo, ReplicaState

FIRST_BACKOFF_S: Final = 1.0
#: A process that lived this long starts again with the first back-off.
STEADY_S: Final = 60.0
#: From the request to stop until SIGKILL.
STOP_GRACE_S: Final = 2.0


class Worker(Channel):
    """One life of an engine process, from start to the moment its end has been reported, once, by `on_exit`.

    on_exit: exit status as `subprocess` gives it (negative: a signal); ring and socket have been read before.
    The process is given three inherited descriptors as arguments: socket, ring memory, doorbell.
    """

    def __init__(
        self,
        module: str,
        ring_capacity: int,
        *,
        on_ring: Callable[[], None],
        on_bytes: Callable[[bytes], None],
        on_exit: Callable[[int], None],
    ) -> None:
        ours, theirs, memory, bell = open_fds(ring_capacity)
        fds = (theirs.fileno(), memory, bell)
        self._child = Child(module, fds, fds, on_exit=self._exited)
        theirs.close()
        # A socket that is closed: the process has ended or has lost its mind. pidfd tells when it is gone.
        super().__init__(ours, memory, bell, ring_capacity, on_ring=on_ring, on_bytes=on_bytes,
                         on_end=self._child.kill)  # fmt: skip
        self._on_exit = on_exit

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        if self._open:
            self._child.kill()

    def attach(
        self, capacity: int, sock: socket.socket, memory: int, bell: int, meter: Spec | None, linger_s: float
    ) -> None:
        """Give the engine one more channel; the descriptors are its ends, and are closed here."""
        data = wire.frame(wire.Attach(capacity, meter, linger_s))
        if self._open and not self._out:
            try:
                sent = socket.send_fds(self._socket, [data], [sock.fileno(), memory, bell])
                self.send(data[sent:])
            except OSError:  # full or dying: the other end is closed unheard, and asks again
                pass
        sock.close()
        for fd in (memory, bell):
            os.close(fd)

    def _exited(self, status: int) -> None:
        self._on_ring()
        self.read_socket()
        self.close()
        self._on_exit(status)


class TorchReplica(RingReplica):
    """The embedded engine as a Replica: restarts its process with back-off; running slots end in Finish.ERROR then.
    One whose code is not the server's any more (an upgrade in place) stays FAILED, and says so."""

    def __init__(
        self, config: EngineConfig, model_path: Path, *, module: str = "evap.engine.torch.worker",
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:  # fmt: skip
        super().__init__()
        self._first_backoff_s = first_backoff_s
        self._config = config
        self._model_path = model_path
        self._module = module
        self._defaults = defaults.read(config.generation_config, model_path)
        self.capacity = capacity_for(config.max_running)
        self._worker: Worker | None = None
        self._fatal: wire.Fatal | None = None
        self._started: asyncio.Future[None] | None = None
        self._gone = asyncio.Event()
        self._failures = 0
        self._ready_at = 0.0
        self._restart: asyncio.TimerHandle | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the present process; None between two."""
        return self._worker.pid if self._worker else None

    async def start(self) -> None:
        self._started = asyncio.get_running_loop().create_future()
        self._spawn()
        await self._started

    def attach(self, sock: socket.socket, memory: int, bell: int, meter: Spec | None, linger_s: float = 0.0) -> None:
        """Give the running engine one more channel, of `capacity` records, for another process; takes the three.
        linger_s: see wire.Attach."""
        if self._worker is not None:
            self._worker.attach(self.capacity, sock, memory, bell, meter, linger_s)

    def lead(self, number: int, meter: Spec | None, hand: Hand, linger_s: float) -> None:
        """A channel to the engine for loop process `number` (interface.Host)."""
        ours, theirs, memory, bell = open_fds(self.capacity)
        hand({"capacity": self.capacity}, self.info, [ours.fileno(), memory, bell])
        ours.close()
        self.attach(theirs, memory, bell, meter, linger_s)

    def gone(self, number: int) -> None:
        """The engine finds the end of its channel by itself."""

    async def stop(self) -> None:
        self._stopping = True
        if self._restart is not None:
            self._restart.cancel()
        if (worker := self._worker) is not None:
            worker.send(wire.frame(wire.Stop()))
            killer = asyncio.get_running_loop().call_later(STOP_GRACE_S, worker.kill)
            await self._gone.wait()
            killer.cancel()
        self._settle(ReplicaState.STOPPED, "stopped")

    def _spawn(self) -> None:
        self._restart = None
        self._fatal = None
        self._frames = wire.from_worker()
        self._gone.clear()
        self._set_state(ReplicaState.STARTING, "starting the engine's process")
        self._worker = self._channel = Worker(
            self._module, self.capacity, on_ring=self._rang, on_bytes=self._received, on_exit=self._exited
        )
        meter = next(iter(self.meters), None)
        boot = wire.Boot(self._config, str(self._model_path), self.capacity, meter, wire.CONTRACT)
        self._worker.send(wire.frame(boot))

    def _told(self, message: wire.FromWorker) -> None:
        match message:
            case wire.Progress():
                self._set_state(self.state, message.line)
            case wire.Ready():
                self._became_ready(message.info)
            case wire.Fatal():
                self._fatal = message

    def _became_ready(self, info: EngineInfo) -> None:
        found = self._defaults
        self._info = msgspec.structs.replace(
            info, sampling_defaults=defaults.sampling(found), default_max_tokens=defaults.max_tokens(found)
        )
        self._ready_at = asyncio.get_running_loop().time()
        self._set_state(ReplicaState.READY, f"{info.device} {info.dtype}, context {info.max_model_len}")
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _exited(self, status: int) -> None:
        was = self.state
        self._worker = self._channel = None
        self._gone.set()
        self._logprobs.clear()
        reason = self._fatal.message if self._fatal else f"the engine's process ended: {describe_end(status)}"
        if self._stopping:
            self._fail_start(StartupError("stopped while starting"))
            return
        if self._started is not None and not self._started.done():
            self._settle(ReplicaState.FAILED, reason)
            self._fail_start(StartupError(reason, remedy=self._fatal.remedy if self._fatal else ""))
            return
        if self._fatal is not None and self._fatal.outdated:
            self._settle(ReplicaState.FAILED, f"{reason}: {self._fatal.remedy}")
            return
        loop = asyncio.get_running_loop()
        if was is ReplicaState.READY and loop.time() - self._ready_at >= STEADY_S:
            self._failures = 0
        delay = pause_s(self._failures, self._first_backoff_s)
        self._failures += 1
        self._restart = loop.call_later(delay, self._spawn)
        self._settle(ReplicaState.FAILED, f"{reason}; next start in {delay:g} s")

    def _fail_start(self, error: StartupError) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
