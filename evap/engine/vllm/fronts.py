"""Sockets of an engine core that several processes use: vLLM's own "clients", each with an address in and one out.

The engine connects to all addresses and sends each process's outputs to its own, by the index that its requests carry.
The host starts the engine and keeps the first address; a guest binds its own. One that takes a dead guest's place binds
the same address: the engine connects again by itself, and what it had queued for the dead one comes first.

Rule: a guest hears nothing before the engine has answered a call of its own. The host has aborted what the dead one had
      asked for by then (`host.py`), so that nothing behind the answer is for anybody else.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from evap.engine.vllm import names
from evap.engine.vllm.addresses import Address
from evap.engine.vllm.client import _UTILITY, CoreSeam, Deaf, Sink
from evap.engine.vllm.zmqwire import Wire, ZmqWire

#: How long a guest waits for the engine to connect and answer; a step of a long prefill may be in it.
HELLO_S: Final = 60.0
_AGAIN_S: Final = 0.02


class HostSeam(CoreSeam):
    """addresses: of all processes; the first is ours."""

    def __init__(self, vllm_config: Any, sink: Sink, addresses: Sequence[Address]) -> None:
        super().__init__(vllm_config, sink)
        self._addresses = addresses

    def _start(self, spawned: Callable[[], None]) -> Any:
        own, kind = self._addresses[0], names.Executor.get_class(self._config)
        places = names.EngineZmqAddresses([a.input for a in self._addresses], [a.output for a in self._addresses])
        manager = None
        try:
            with names.launch_core_engines(self._config, kind, False, places) as launch:
                manager = launch.engine_manager
                spawned()
            client = names.EngineCoreClient.make_async_mp_client(
                vllm_config=self._config, executor_class=kind, log_stats=False, client_index=0,
                client_count=len(self._addresses),
                client_addresses={"input_address": own.input, "output_address": own.output},
            )  # fmt: skip
        except BaseException:
            if manager is not None:
                manager.shutdown(timeout=0)
            raise
        client.resources.engine_manager = manager  # from here on as if it had started the engine by itself
        client.start_engine_core_monitor()
        return client


class _Sockets:
    """As vLLM's resources of a client, of one that has no engine to end."""

    engine_manager = None
    engine_dead = False
    output_queue_task: Any = None

    def __init__(self, address: Address) -> None:
        self.ctx = zmq.Context()
        self.input_socket = self.ctx.socket(zmq.ROUTER)
        self.output_socket = self.ctx.socket(zmq.PULL)
        for sock in (self.input_socket, self.output_socket):
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVHWM, 0)
            sock.setsockopt(zmq.SNDHWM, 0)
        self.input_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an engine that is not there is an error
        self.input_socket.bind(address.input)
        self.output_socket.bind(address.output)


class _Client:
    """As much of vLLM's client as `CoreSeam` uses."""

    core_engine = (0).to_bytes(2, "little")  # the identity of the first and only engine

    def __init__(self, address: Address) -> None:
        self.resources = _Sockets(address)
        self.encoder = names.MsgpackEncoder()
        self.decoder = names.MsgpackDecoder(names.EngineCoreOutputs)

    def shutdown(self, timeout: float | None = None) -> None:
        self.resources.input_socket.close()
        self.resources.output_socket.close()


class GuestSeam(CoreSeam):
    """address: ours, which the engine connects to."""

    def __init__(self, vllm_config: Any, sink: Sink, address: Address) -> None:
        super().__init__(vllm_config, sink, address.number)
        self._call_ids = itertools.count(secrets.randbits(48))  # no answer to a dead guest's call is one to ours
        self._address = address

    async def open(self, spawned: Callable[[], None]) -> None:
        """Raises RuntimeError, or TimeoutError for an engine that does not answer."""
        spawned()
        sink, self._sink = self._sink, Deaf()
        try:
            self._client = _Client(self._address)
            await self._attach()
            async with asyncio.timeout(HELLO_S):
                await self._hello()
        except zmq.ZMQError as e:
            raise RuntimeError(f"no way to the engine ({e})") from e
        self._sink = sink

    async def _connect(self, resources: Any) -> Wire:
        """By libzmq: what it says of an engine that is not there (yet) is needed."""
        sockets = resources.input_socket, resources.output_socket
        return ZmqWire(*sockets, self._client.core_engine, self._take, self._die)

    async def _hello(self) -> None:
        answered: asyncio.Future[None] = self._loop.create_future()

        def done(failure: str | None, _result: Any) -> None:
            if not answered.done():
                answered.set_result(None) if failure is None else answered.set_exception(RuntimeError(failure))

        call_id = next(self._call_ids)
        self._calls[call_id] = done
        frames = self._encode((self._index, call_id, "is_scheduler_paused", ()))
        while not self._said([self._client.core_engine, _UTILITY, *frames]):  # noqa: ASYNC110  # zmq does not say when
            await asyncio.sleep(_AGAIN_S)
        await answered

    def _said(self, message: Sequence[Any]) -> bool:
        """False: the engine has not connected yet."""
        try:
            self._client.resources.input_socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True
