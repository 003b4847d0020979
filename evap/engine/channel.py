"""One end of the way between a loop and an engine's process: a stream socket, a token ring, a doorbell.

`Channel` moves bytes; `RingReplica` is what a Replica does with one: submit and cancel over the socket, tokens out of
the ring, and one final record for each slot whatever becomes of the other end. Everything runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from evap.engine.interface import How, OnBatch, OnState, known
from evap.engine.meter import Spec
from evap.engine.owed import SlotLedger
from evap.engine.torch import wire
from evap.messages import (
    HAS_LOGPROBS,
    EngineInfo,
    GenerateRequest,
    ReplicaState,
    SamplingParams,
    TokenBatch,
    TokenLogprobs,
)
from evap.ring import RingReader, format_ring, ring_bytes

_READ_BYTES: Final = 1 << 18


def capacity_for(max_running: int) -> int:
    """Records of a ring for an engine that runs so many generations."""
    return 1 << max(4096, 8 * max_running).bit_length()


def open_fds(capacity: int) -> tuple[socket.socket, socket.socket, int, int]:
    """(our socket, the engine's socket, ring memory, doorbell) of a new channel; the ring is formatted."""
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("evap-ring")
    os.ftruncate(memory, ring_bytes(capacity))
    with mmap.mmap(memory, ring_bytes(capacity)) as view:
        format_ring(view, capacity)
    return ours, theirs, memory, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class Channel:
    """The loop's end. Owns what it is given and closes it.

    on_ring: records may be there (the doorbell rang). on_bytes: data from the socket. on_end: the other end is closed.
    """

    def __init__(
        self, sock: socket.socket, memory: int, bell: int, capacity: int, *,
        on_ring: Callable[[], None], on_bytes: Callable[[bytes], None], on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._on_ring, self._on_bytes, self._on_end = on_ring, on_bytes, on_end
        self._out = bytearray()
        self._flushing = False
        self._socket, self._bell = sock, bell
        self._map = mmap.mmap(memory, ring_bytes(capacity))
        os.close(memory)
        self.ring = RingReader(self._map, capacity)
        sock.setblocking(False)
        self._open = True
        self._loop.add_reader(bell, self._ring_bell)
        self._loop.add_reader(sock.fileno(), self.read_socket)

    def send(self, data: bytes) -> None:
        """Queue bytes for the engine; those of one pass of the loop leave together."""
        if not self._open:
            return
        self._out += data
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

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
                self._loop.remove_reader(self._socket.fileno())
                self._on_end()
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
        except OSError:  # it is dying, which is reported otherwise
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

    def close(self) -> None:
        """Let go of everything."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_writer(self._socket.fileno())
        for fd in (self._bell, self._socket.fileno()):
            self._loop.remove_reader(fd)
        os.close(self._bell)
        self._socket.close()
        self.ring.close()
        self._map.close()


class RingReplica:
    """The part of a Replica that speaks over a Channel. Who makes channels, and when, is the subclass's business."""

    adapters: tuple[str, ...] = ()
    engines = 1
    runs_ahead = False
    meters: Sequence[Spec] = ()

    def __init__(self) -> None:
        self.state = ReplicaState.STOPPED
        self._info: EngineInfo | None = None
        self._on_batch: OnBatch = lambda batch: None
        self._on_state: OnState = lambda state, line: None
        self._ledger = SlotLedger()
        self._logprobs: dict[tuple[int, int, int], TokenLogprobs] = {}
        self._channel: Channel | None = None
        self._frames = wire.from_worker()

    @property
    def info(self) -> EngineInfo:
        return known(self._info)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that generations hold, as of the last step; 0 without an engine."""
        return self._channel.ring.kv_usage if self._channel is not None else 0.0

    @property
    def beats(self) -> int:
        """Moves while the engine computes, also inside of a step."""
        return self._channel.ring.beats if self._channel is not None else 0

    @property
    def step_since_ns(self) -> int:
        """When the step began that the engine computes; 0: none."""
        return self._channel.ring.step_since_ns if self._channel is not None else 0

    def check(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Nothing beyond check_request."""

    def listen(self, on_batch: OnBatch, on_state: OnState) -> None:
        self._on_batch, self._on_state = on_batch, on_state

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None:
        self._ledger.open(slot, generation)
        if self.state is ReplicaState.READY and self._channel is not None:
            self._channel.send(wire.frame(wire.pack_request(slot, generation, request)))
        else:  # a callback from within submit would surprise its caller
            asyncio.get_running_loop().call_soon(self._refuse, slot, generation)

    def cancel(self, slot: int, generation: int) -> None:
        if self._channel is not None and self._ledger.owes(slot, generation):
            self._channel.send(wire.frame(wire.Cancel(slot, generation)))

    def _rang(self) -> None:
        while self._channel is not None and (batch := self._channel.ring.poll()) is not None:
            with_logprobs = np.flatnonzero(batch.flags & HAS_LOGPROBS)
            if len(with_logprobs):
                # The worker writes them to the socket before it rings, so they are there by now.
                self._channel.read_socket()
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
                case _:
                    self._told(message)

    def _told(self, message: wire.FromWorker) -> None:
        """What only the engine's own parent hears."""

    def _settle(self, state: ReplicaState, line: str) -> None:
        """Enter a state without an engine: whatever still runs has failed."""
        self._set_state(state, line)
        if (batch := self._ledger.fail()) is not None:
            self._on_batch(batch)

    def _refuse(self, slot: int, generation: int) -> None:
        if self._ledger.owes(slot, generation) and (batch := self._ledger.fail([slot])) is not None:
            self._on_batch(batch)

    def _set_state(self, state: ReplicaState, line: str) -> None:
        self.state = state
        self._on_state(state, line)


class ChannelReplica(RingReplica):
    """An engine that another process has started and watches: the parent says how it is, and hands channels over.

    ask: called with our counters page when a channel is wanted: at the start, and when one has ended.
    """

    def __init__(self, ask: Callable[[Spec | None], None]) -> None:
        super().__init__()
        self.state = ReplicaState.STARTING
        self._ask = ask
        self._ready = asyncio.Event()

    async def start(self) -> None:
        """Return when the first channel is there."""
        self._want()
        await self._ready.wait()

    def _want(self) -> None:
        self._ask(next(iter(self.meters), None))

    async def stop(self) -> None:
        self._drop()
        self._settle(ReplicaState.STOPPED, "stopped")

    def attach(self, how: How, info: EngineInfo, fds: Sequence[int]) -> None:
        """The engine is ready, and this is the way to it: socket, ring memory, doorbell."""
        sock, memory, bell = fds
        self._drop()
        if (batch := self._ledger.fail()) is not None:
            self._on_batch(batch)
        self._info = info
        self._frames = wire.from_worker()
        self._channel = Channel(
            socket.socket(fileno=sock), memory, bell, int(how["capacity"]),
            on_ring=self._rang, on_bytes=self._received, on_end=self._ended,
        )  # fmt: skip
        self._set_state(ReplicaState.READY, f"{info.device} {info.dtype}, context {info.max_model_len}")
        self._ready.set()

    def engine_is(self, state: ReplicaState, line: str) -> None:
        """What the parent says. READY comes with a channel."""
        if state is ReplicaState.READY:
            return
        if state is ReplicaState.STARTING:
            self._set_state(state, line)
        elif self.state is not ReplicaState.FAILED:
            self._rang()
            self._drop()
            self._settle(state, line)
            self._want()

    def _ended(self) -> None:
        """The engine has died, or has given this channel up because its ring was full for too long."""
        self._rang()
        self._drop()
        self._settle(ReplicaState.FAILED, "the way to the engine is closed")
        self._want()

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        self._logprobs.clear()
        if channel is not None:
            channel.close()
