"""Seam "core": the engine core's client below AsyncLLM. One wake of the loop per engine step.

vLLM's client starts the engine and owns the sockets; evap reads and writes them itself, because a future and a task
wake-up per message cost more than everything else on this path. ZMQ's descriptor is edge-triggered: it is drained
until it would block.

Rule 1: vLLM closes the sockets on the loop's thread when the engine has died; the loop watches a duplicate of the
        descriptor, so that a number that was closed and given out again is never watched.
Rule 2: requests and aborts of one pass of the loop go out together, in order, at its end; the first request at once.
Rule 3: the engine answers an abort with silence. A call that follows it through the same queue is its confirmation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import zmq

from evap.engine.vllm import ids, names
from evap.engine.vllm.plain import PlainReader
from evap.engine.vllm.rows import Account, Outputs, Step, needs_tensors, rows_of
from evap.engine.vllm.runs import Row

logger = logging.getLogger(__name__)

#: Messages taken per wake, so that a flood from the engine cannot keep the loop from its other work.
MOST_PER_WAKE = 32
#: zmq's own are enumerations, whose arithmetic costs more than the call
_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_ADD: Final[bytes] = names.EngineCoreRequestType.ADD.value
_ABORT: Final[bytes] = names.EngineCoreRequestType.ABORT.value
_UTILITY: Final[bytes] = names.EngineCoreRequestType.UTILITY.value
_encode: Final = msgspec.msgpack.Encoder().encode
#: Sampling parameters whose encoding is remembered.
MOST_KNOWN: Final = 256
#: ZMQ copies messages that are shorter; sharing memory with its thread costs more.
MOST_COPIED: Final = 64 << 10
Buffer: TypeAlias = "bytes | bytearray | memoryview"


class Sink(Protocol):
    """What a seam reports, on the loop's thread."""

    def on_step(self, step: Step) -> None: ...
    def on_aborted(self, ids: Sequence[str]) -> None:
        """The engine has dropped these, or had finished them before."""
        ...

    def on_death(self, reason: str) -> None:
        """Once, unless `close` was called. Nothing is reported afterwards."""
        ...


class Seam(Protocol):
    """How the replica talks to one running engine."""

    async def open(self, spawned: Callable[[], None]) -> None:
        """Start the engine; `spawned` is called (on any thread) once its processes exist. Raises what vLLM raises."""
        ...

    def add(self, request: Any) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def call(self, method: str, *args: object) -> Awaitable[Any]: ...
    async def close(self, timeout_s: float) -> None: ...
    def pids(self) -> list[int]: ...


class _Spawned:
    """Stands where vLLM expects a renderer, which it tells when the engine's processes have been started."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def start_mm_warmup_in_background(self) -> None:
        self._call()


class CoreSeam:
    """index: our number among the processes that use the engine."""

    def __init__(self, vllm_config: Any, sink: Sink, index: int = 0) -> None:
        self._config = vllm_config
        self._index = index
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._client: Any = None
        self._fd = -1
        self._over = False
        self._decoder = msgspec.msgpack.Decoder(Outputs)
        self._plain = plain_reader()
        self._known: dict[int, tuple[Any, msgspec.Raw]] = {}  # id of sampling parameters -> they, and encoded
        self._calls: dict[int, Callable[[str | None, Any], None]] = {}
        self._call_ids = itertools.count(1)
        self._adds: list[Any] = []
        self._aborts: list[str] = []
        self._flushing = False

    async def open(self, spawned: Callable[[], None]) -> None:
        before = set(multiprocessing.active_children())
        starting = asyncio.ensure_future(asyncio.to_thread(self._start, spawned))
        try:
            self._client = await asyncio.shield(starting)
        except asyncio.CancelledError:  # vLLM's start cannot be interrupted, but it notices when its process ends
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            with contextlib.suppress(Exception):
                (await starting).shutdown(timeout=0)
            raise
        self._attach()

    def _start(self, spawned: Callable[[], None]) -> Any:
        """vLLM's client, when the engine is up (in a thread)."""
        return names.EngineCoreClient.make_async_mp_client(
            vllm_config=self._config,
            executor_class=names.Executor.get_class(self._config),
            log_stats=False,
            renderer=_Spawned(spawned),
        )

    def _attach(self) -> None:
        resources = self._client.resources
        died = self._loop.create_future()
        resources.output_queue_task = died  # vLLM cancels this "task" after it has closed the sockets of a dead engine
        died.add_done_callback(lambda _: self._die("the engine's process ended"))
        self._out = zmq.Socket.shadow(resources.output_socket.underlying)
        self._in = zmq.Socket.shadow(resources.input_socket.underlying)
        self._engine = self._client.core_engine
        self._encode = self._client.encoder.encode
        if resources.engine_dead:
            raise RuntimeError("the engine's process ended while it was starting")
        self._fd = os.dup(self._out.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)  # what came before the reader was there gave no edge

    def pids(self) -> list[int]:
        manager = self._client.resources.engine_manager if self._client is not None else None
        return [process.pid for process in manager.processes] if manager is not None else []

    # Out

    def add(self, request: Any) -> None:
        self._adds.append(request)
        if not self._flushing:
            self._flush()  # before the head of its answer is written: that wakes a client, which may take our core
        self._flush_soon()

    def abort(self, request_id: str) -> None:
        for n, request in enumerate(self._adds):
            if request.request_id == request_id:  # the engine never hears of it
                del self._adds[n]
                self._loop.call_soon(self._sink.on_aborted, [request_id])
                return
        self._aborts.append(request_id)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        adds, self._adds = self._adds, []
        aborts, self._aborts = self._aborts, []
        if self._over:
            return
        for request in adds:
            self._send(_ADD, self._request(request))
        if aborts:
            self._send(_ABORT, self._encode(aborts))
            self._utility("is_scheduler_paused", (), lambda _failure, _result: self._sink.on_aborted(aborts))

    def _request(self, request: Any) -> Sequence[Buffer]:
        """A request, encoded. Sampling parameters are most of it, and those of many requests are one object."""
        params = request.sampling_params
        request.client_index = self._index
        known = self._known.get(id(params))
        if known is None or known[0] is not params:
            parts = self._encode(params)
            if len(parts) != 1:  # vLLM's encoding of what msgspec does not know
                encoded: Sequence[Buffer] = self._encode(request)
                return encoded
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[id(params)] = params, msgspec.Raw(parts[0])
        request.sampling_params = known[1]
        return (_encode(request),)

    def _send(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        send = self._in.send
        try:
            send(self._engine, _NOBLOCK_MORE)
            send(kind, _NOBLOCK_MORE)
            for part in parts[:-1]:
                send(part, _NOBLOCK_MORE, copy=len(part) < MOST_COPIED)
            send(parts[-1], _NOBLOCK, copy=len(parts[-1]) < MOST_COPIED)
        except zmq.ZMQError as e:
            self._loop.call_soon(self._die, f"the engine takes no requests ({e})")

    def _utility(self, method: str, args: Sequence[object], done: Callable[[str | None, Any], None]) -> None:
        call_id = next(self._call_ids)
        self._calls[call_id] = done
        self._send(_UTILITY, self._encode((self._index, call_id, method, args)))

    def call(self, method: str, *args: object) -> Awaitable[Any]:
        """Run a method of EngineCore. The result is plain data. Raises RuntimeError with what it raised there."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def done(failure: str | None, result: Any) -> None:
            if future.done():
                return
            if failure is not None:
                future.set_exception(RuntimeError(failure))
            else:
                future.set_result(result[1] if result else None)  # (type information, value)

        if self._over:
            done("the engine is not running", None)
        else:
            self._utility(method, args, done)
        return future

    # In

    def _drain(self) -> None:
        receive, events = self._out.recv, self._out.getsockopt
        try:
            for _ in range(MOST_PER_WAKE):
                part = receive(_NOBLOCK, copy=False)
                if part.more:
                    frames = [part.bytes]
                    while part.more:
                        part = receive(_NOBLOCK, copy=False)
                        frames.append(part.bytes)
                    self._take(frames)
                else:
                    self._take([part.bytes])
                if self._over or not events(_EVENTS) & _POLLIN:  # this also arms the descriptor again
                    return
        except zmq.Again:  # a wake for nothing
            return
        except zmq.ZMQError:  # closed: `_die` is about to be called
            return
        self._loop.call_soon(self._drain)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) == 1 and frames[0] == names.EngineCoreProc.ENGINE_CORE_DEAD:
            self._die("the engine reports that it failed")
            return
        plain = self._plain.read(frames[0]) if self._plain is not None else None
        if plain is None:
            self._whole(frames)
        elif plain.others is None:
            self._sink.on_step(Step(plain.slots, plain.generations, plain.tokens))
        else:
            others = [plain.others, *frames[1:]]
            rows, accounts = self._rows(self._decoder.decode(plain.others), others)
            self._sink.on_step(Step(plain.slots, plain.generations, plain.tokens, rows, accounts))

    def _whole(self, frames: list[bytes]) -> None:
        """A message without plain outputs."""
        message = self._decoder.decode(frames[0])
        if message.utility_output is not None:
            utility = message.utility_output
            done = self._calls.pop(utility.call_id, None)
            if done is not None:
                done(utility.failure_message, utility.result)
        elif message.outputs:
            rows, accounts = self._rows(message, frames)
            self._sink.on_step(Step(rows=rows, accounts=accounts))

    def _rows(self, message: Outputs, frames: list[bytes]) -> tuple[list[Row], list[Account]]:
        outputs = message.outputs
        return rows_of(outputs, self._client.decoder.decode(frames).outputs if needs_tensors(outputs) else None)

    # The end

    def _die(self, reason: str) -> None:
        if not self._over:
            self._detach(reason)
            self._sink.on_death(reason)

    def _detach(self, reason: str) -> None:
        self._over = True
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        calls, self._calls = self._calls, {}
        for done in calls.values():
            done(reason, None)

    async def close(self, timeout_s: float) -> None:
        """End the engine's processes, by force after `timeout_s`."""
        self._sink = Deaf()
        self._detach("the engine was stopped")
        if self._client is not None:
            await asyncio.to_thread(self._client.shutdown, timeout=timeout_s)
            await asyncio.sleep(0)  # vLLM closes its sockets in the next pass of the loop
            self._client.resources.ctx.destroy(linger=0)


def plain_reader() -> PlainReader | None:
    """None for a release whose messages cannot be read that way: each output is looked at by itself then."""
    encode, sample = msgspec.msgpack.encode, ids.make("000000", 0, 0, 0)
    output = names.EngineCoreOutput(sample, [1])
    try:
        return PlainReader(encode(names.EngineCoreOutputs(outputs=[output], timestamp=1.5)), encode(output), sample)
    except ValueError as e:
        logger.warning("%s: tokens cost more here", e)
        return None


class Deaf:
    """Takes what comes after the end."""

    def on_step(self, step: Step) -> None: ...
    def on_aborted(self, ids: Sequence[str]) -> None: ...
    def on_death(self, reason: str) -> None: ...
