"""Seam "core": the engine core's client below AsyncLLM. One wake of the loop per engine step.

vLLM's client starts the engine and watches its process; evap reads and writes the connections itself (wire.py), because
a future and a task wake-up per message cost more than everything else on this path.

Rule 1: requests and aborts of one pass of the loop go out together, in order, at its end; the first request at once.
Rule 2: the engine answers an abort with silence. A call that follows it through the same queue is its confirmation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from evap.engine.vllm import ids, names
from evap.engine.vllm.plain import PlainReader
from evap.engine.vllm.rows import Account, Outputs, Step, needs_tensors, rows_of
from evap.engine.vllm.runs import Row
from evap.engine.vllm.wire import take_over
from evap.engine.vllm.zmqwire import Wire
from evap.engine.vllm.zmtp import Buffer

logger = logging.getLogger(__name__)

_ADD: Final[bytes] = names.EngineCoreRequestType.ADD.value
_ABORT: Final[bytes] = names.EngineCoreRequestType.ABORT.value
_UTILITY: Final[bytes] = names.EngineCoreRequestType.UTILITY.value
_encode: Final = msgspec.msgpack.Encoder().encode
#: Sampling parameters whose encoding is remembered.
MOST_KNOWN: Final = 256


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
        self._wire: Wire | None = None
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
        await self._attach()

    def _start(self, spawned: Callable[[], None]) -> Any:
        """vLLM's client, when the engine is up (in a thread)."""
        return names.EngineCoreClient.make_async_mp_client(
            vllm_config=self._config,
            executor_class=names.Executor.get_class(self._config),
            log_stats=False,
            renderer=_Spawned(spawned),
        )

    async def _attach(self) -> None:
        resources = self._client.resources
        died = self._loop.create_future()
        resources.output_queue_task = died  # vLLM cancels this "task" after it has closed the sockets of a dead engine
        self._encode = self._client.encoder.encode
        wire = await self._connect(resources)
        if resources.engine_dead or died.done():
            wire.close()
            raise RuntimeError("the engine's process ended while it was starting")
        self._wire = wire
        died.add_done_callback(lambda _: self._die("the engine's process ended"))

    async def _connect(self, resources: Any) -> Wire:
        """By the sockets of vLLM's client."""
        sockets = resources.input_socket, resources.output_socket
        return await take_over(resources.ctx, sockets, self._client.core_engine, self._take, self._die)

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
        wire = self._wire
        if wire is None:
            return
        for request in adds:
            wire.send((_ADD, *self._request(request)))
        if aborts:
            wire.send((_ABORT, *self._encode(aborts)))
            self._utility(wire, "is_scheduler_paused", (), lambda _failure, _result: self._sink.on_aborted(aborts))
        wire.flush()

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

    def _utility(
        self, wire: Wire, method: str, args: Sequence[object], done: Callable[[str | None, Any], None]
    ) -> None:
        call_id = next(self._call_ids)
        self._calls[call_id] = done
        wire.send((_UTILITY, *self._encode((self._index, call_id, method, args))))

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

        if self._wire is None:
            done("the engine is not running", None)
        else:
            self._utility(self._wire, method, args, done)
            self._wire.flush()
        return future

    # In

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
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
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
