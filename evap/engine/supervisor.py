"""An engine in a process of its own: start, feed, watch, restart, end. The generic half knows no model.

`Worker` is one life of a process: a stream socket for commands, a token ring in shared memory, a doorbell (eventfd)
and a pidfd. `TorchReplica` is a Replica over a succession of Workers. Everything runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from evap.config import EngineConfig
from evap.engine import defaults
from evap.engine.child import describe_end, environment
from evap.engine.interface import OnBatch, OnState
from evap.engine.meter import Spec
from evap.engine.owed import SlotLedger
from evap.engine.torch import wire
from evap.errors import StartupError
from evap.messages import (
    HAS_LOGPROBS,
    EngineInfo,
    GenerateRequest,
    ReplicaState,
    SamplingParams,
    TokenBatch,
    TokenLogprobs,
)
from evap.ring import RingReader, ring_bytes

FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 30.0
#: A process that lived this long starts again with the first back-off.
STEADY_S: Final = 60.0
#: From the request to stop until SIGKILL.
STOP_GRACE_S: Final = 2.0
_READ_BYTES: Final = 1 << 18


class Worker:
    """One life of an engine process, from start to the moment its end has been reported, once, by `on_exit`.

    on_ring: records may be there (the doorbell rang, or the process ended). on_bytes: data from the socket.
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
        self._loop = asyncio.get_running_loop()
        self._on_ring, self._on_bytes, self._on_exit = on_ring, on_bytes, on_exit
        self._out = bytearray()
        self._flushing = False
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("evap-ring")
        os.ftruncate(memory, ring_bytes(ring_capacity))
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._map = mmap.mmap(memory, ring_bytes(ring_capacity))
        self.ring = RingReader(self._map, ring_capacity)  # formats the memory before the process can see it
        fds = (theirs.fileno(), memory, self._bell)
        command = [sys.executable, "-m", module, *map(str, fds)]
        self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=environment())
        theirs.close()
        os.close(memory)
        self._socket = ours
        ours.setblocking(False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._open = True
        self._loop.add_reader(self._bell, self._ring_bell)
        self._loop.add_reader(ours.fileno(), self.read_socket)
        self._loop.add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, data: bytes) -> None:
        """Queue bytes for the process; those of one pass of the loop leave together."""
        if not self._open:
            return
        self._out += data
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def kill(self) -> None:
        if self._open:
            self._process.kill()

    def read_socket(self) -> None:
        """Hand on all that the socket holds now."""
        while self._open:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # The other end is closed: the process has ended or has lost its mind. pidfd tells when it is gone.
                self._loop.remove_reader(self._socket.fileno())
                self._process.kill()
                return
            self._on_bytes(data)

    def _flush(self) -> None:
        self._flushing = False
        if not self._open:
            return
        try:
            sent = self._socket.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError:  # it is dying: pidfd reports that
            sent = len(self._out)
        del self._out[:sent]
        if self._out:
            self._flushing = True
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        self._flush()

    def _ring_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._on_ring()

    def _exited(self) -> None:
        if not self._open:
            return
        status = self._process.wait()
        self._on_ring()
        self.read_socket()
        self.close()
        self._on_exit(status)

    def close(self) -> None:
        """Let go of everything. The process must have ended."""
        self._open = False
        self._loop.remove_writer(self._socket.fileno())
        for fd in (self._bell, self._socket.fileno(), self._pidfd):
            self._loop.remove_reader(fd)
        os.close(self._bell)
        os.close(self._pidfd)
        self._socket.close()
        self.ring.close()
        self._map.close()


class TorchReplica:
    """The embedded engine as a Replica: restarts its process with back-off; running slots end in Finish.ERROR then."""

    adapters: tuple[str, ...] = ()
    engines = 1
    runs_ahead = False
    meters: Sequence[Spec] = ()

    def __init__(
        self, config: EngineConfig, model_path: Path, *, module: str = "evap.engine.torch.worker",
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:  # fmt: skip
        self._first_backoff_s = first_backoff_s
        self._config = config
        self._model_path = model_path
        self._module = module
        self._defaults = defaults.read(config.generation_config, model_path)
        self._capacity = 1 << max(4096, 8 * config.max_running).bit_length()
        self.state = ReplicaState.STOPPED
        self._info: EngineInfo | None = None
        self._on_batch: OnBatch = lambda batch: None
        self._on_state: OnState = lambda state, line: None
        self._ledger = SlotLedger()
        self._logprobs: dict[tuple[int, int, int], TokenLogprobs] = {}
        self._worker: Worker | None = None
        self._frames = wire.from_worker()
        self._fatal: wire.Fatal | None = None
        self._started: asyncio.Future[None] | None = None
        self._gone = asyncio.Event()
        self._failures = 0
        self._ready_at = 0.0
        self._restart: asyncio.TimerHandle | None = None
        self._stopping = False

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RuntimeError("the engine has not been ready yet")
        return self._info

    @property
    def pid(self) -> int | None:
        """Of the present process; None between two."""
        return self._worker.pid if self._worker else None

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that generations hold, as of the last step; 0 between two processes."""
        return self._worker.ring.kv_usage if self._worker else 0.0

    def check(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Nothing beyond check_request."""

    def listen(self, on_batch: OnBatch, on_state: OnState) -> None:
        self._on_batch, self._on_state = on_batch, on_state

    async def start(self) -> None:
        self._started = asyncio.get_running_loop().create_future()
        self._spawn()
        await self._started

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None:
        self._ledger.open(slot, generation)
        if self.state is ReplicaState.READY and self._worker is not None:
            self._worker.send(wire.frame(wire.pack_request(slot, generation, request)))
        else:  # a callback from within submit would surprise its caller
            asyncio.get_running_loop().call_soon(self._refuse, slot, generation)

    def cancel(self, slot: int, generation: int) -> None:
        if self._worker is not None and self._ledger.owes(slot, generation):
            self._worker.send(wire.frame(wire.Cancel(slot, generation)))

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
        self._worker = Worker(
            self._module, self._capacity, on_ring=self._rang, on_bytes=self._received, on_exit=self._exited
        )
        boot = wire.Boot(self._config, str(self._model_path), self._capacity, next(iter(self.meters), None))
        self._worker.send(wire.frame(boot))

    def _rang(self) -> None:
        while self._worker is not None and (batch := self._worker.ring.poll()) is not None:
            with_logprobs = np.flatnonzero(batch.flags & HAS_LOGPROBS)
            if len(with_logprobs):
                # The worker writes them to the socket before it rings, so they are there by now.
                self._worker.read_socket()
                batch.logprobs = self._join(batch, with_logprobs.tolist())
            self._ledger.note(batch)
            self._on_batch(batch)

    def _join(self, batch: TokenBatch, rows: list[int]) -> dict[int, TokenLogprobs]:
        found: dict[int, TokenLogprobs] = {}
        for row in rows:
            key = (int(batch.slot[row]), int(batch.generation[row]), int(batch.index[row]))
            entry = self._logprobs.pop(key, None)
            if entry is not None:
                found[row] = entry
        return found

    def _received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            match message:
                case wire.LogprobBatch():
                    self._logprobs.update(((e.slot, e.generation, e.index), e.logprobs) for e in message.entries)
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
        self._worker = None
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
        loop = asyncio.get_running_loop()
        if was is ReplicaState.READY and loop.time() - self._ready_at >= STEADY_S:
            self._failures = 0
        delay = min(MAX_BACKOFF_S, self._first_backoff_s * 2**self._failures)
        self._failures += 1
        self._restart = loop.call_later(delay, self._spawn)
        self._settle(ReplicaState.FAILED, f"{reason}; next start in {delay:g} s")

    def _fail_start(self, error: StartupError) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    def _settle(self, state: ReplicaState, line: str) -> None:
        """Enter a state without a process: whatever still runs has failed."""
        self._set_state(state, line)
        if (batch := self._ledger.fail()) is not None:
            self._on_batch(batch)

    def _refuse(self, slot: int, generation: int) -> None:
        if self._ledger.owes(slot, generation) and (batch := self._ledger.fail([slot])) is not None:
            self._on_batch(batch)

    def _set_state(self, state: ReplicaState, line: str) -> None:
        self.state = state
        self._on_state(state, line)
