"""The two connections of an engine core: requests to it (its DEALER), outputs of it (its PUSH).

vLLM's client makes them with libzmq and waits until the engine is up. Then they are taken over: its sockets are closed,
the same paths bound again by us, and the engine's end connects anew by itself within a fifth of a second, as libzmq's
peers do. Nothing is under way at that moment. Where that is not possible (TCP, a peer that speaks something else) new
sockets of libzmq are bound there.

Rule 1: an end of either connection is the engine's end: it has them open for life, and both are of this machine.
Rule 2: what is sent within one pass of the loop is one write (`flush`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import zmq

from evap.engine.vllm.zmqwire import Ended, EndsOnce, Take, Wire, ZmqWire, bound, until
from evap.engine.vllm.zmtp import Buffer, Peer, Stage, ZmtpError, pieces

logger = logging.getLogger(__name__)

_IPC: Final = "ipc://"
#: Octets taken at once: a step of two thousand sequences.
READ_SIZE: Final = 128 << 10
#: for libzmq to let go of a path, and for the engine to be there again
LEAVE_S: Final = 1.0
RETURN_S: Final = 5.0


async def take_over(context: Any, sockets: Sequence[Any], engine: bytes, take: Take, ended: Ended) -> Wire:
    """sockets: vLLM's bound ROUTER and PULL, of `context`. engine: its identity. Raises OSError."""
    plain: list[zmq.Socket[bytes]] = [zmq.Socket.shadow(one.underlying) for one in sockets]
    requests, outputs = plain
    ends = [one.getsockopt(zmq.LAST_ENDPOINT).decode() for one in plain]
    if not all(end.startswith(_IPC + "/") for end in ends):
        return ZmqWire(requests, outputs, engine, take, ended)
    early = _rest_of(outputs)
    for one in sockets:
        one.close(linger=0)
    wire = await _own([Path(end.removeprefix(_IPC)) for end in ends], engine, take, ended)
    if wire is None:
        requests, outputs = await bound(context, ends, RETURN_S)
        wire = ZmqWire(requests, outputs, engine, take, ended, owns=True)
    for message in early:
        asyncio.get_running_loop().call_soon(take, message)
    return wire


async def _own(paths: Sequence[Path], engine: bytes, take: Take, ended: Ended) -> Wire | None:
    try:
        await _left(paths)
        async with asyncio.timeout(RETURN_S):
            return await UnixWire.bind(paths, engine, take, ended)
    except (OSError, TimeoutError, ZmtpError) as e:
        logger.warning("the engine's sockets stay with libzmq (%s): tokens cost more", e or type(e).__name__)
        return None


def _rest_of(outputs: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Messages that came before anybody read."""
    found = []
    with contextlib.suppress(zmq.Again):
        while True:
            found.append(outputs.recv_multipart(zmq.NOBLOCK))
    return found


async def _left(paths: Sequence[Path]) -> None:
    """libzmq removes a path that it has bound, by a thread of its own, some time after the socket was closed."""
    if not await until(lambda: not any(path.exists() for path in paths), LEAVE_S):
        for path in paths:
            path.unlink(missing_ok=True)  # not libzmq's: it was given the listener


class UnixWire(EndsOnce):
    """Our own end of both, on the loop."""

    def __init__(self, requests: _Connection, outputs: _Connection, take: Take, ended: Ended) -> None:
        super().__init__(ended)
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._requests, self._outputs = requests, outputs
        self._queue: list[Buffer] = []  # of this pass; and of all since the engine is behind
        self._rest: memoryview | None = None  # the engine has not taken these yet
        self._buffer = bytearray(READ_SIZE)
        self._view = memoryview(self._buffer)
        self._loop.add_reader(outputs.socket.fileno(), self._read, outputs)
        self._loop.add_reader(requests.socket.fileno(), self._read, requests)

    @classmethod
    async def bind(cls, paths: Sequence[Path], engine: bytes, take: Take, ended: Ended) -> UnixWire:
        """Waits until the engine has connected to both, that of requests first. Raises OSError, ZmtpError."""
        both = requests, outputs = _Connection("ROUTER", "DEALER"), _Connection("PULL", "PUSH")
        try:
            async with asyncio.TaskGroup() as group:
                for one, path in zip(both, paths, strict=True):
                    group.create_task(one.accept(path))
            if requests.peer.identity != engine:
                raise ZmtpError(f"an engine named {requests.peer.identity!r}")
        except BaseException as e:
            for one in both:
                one.close()
            if isinstance(e, ExceptionGroup):
                raise e.exceptions[0] from None
            raise
        wire = cls(requests, outputs, take, ended)
        for message in outputs.early:
            wire._loop.call_soon(take, message)
        return wire

    # Out

    def send(self, message: Sequence[Buffer]) -> None:
        self._queue += pieces(message)

    def flush(self) -> None:
        if self._rest is not None:  # they follow it
            return
        queue, self._queue = self._queue, []
        if queue and not self._over:
            self._write(memoryview(b"".join(queue)))

    def _write(self, data: memoryview) -> None:
        """As much as fits; the rest when there is room."""
        descriptor = self._requests.socket.fileno()
        try:
            sent = self._requests.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self._loop.call_soon(self._lost, f"the engine takes no requests ({e})")
            return
        waited, self._rest = self._rest is not None, data[sent:] if sent < len(data) else None
        if self._rest is not None and not waited:
            self._loop.add_writer(descriptor, self._write_rest)
        elif self._rest is None and waited:
            self._loop.remove_writer(descriptor)

    def _write_rest(self) -> None:
        if self._rest is not None:
            self._write(self._rest)
            self.flush()

    # In

    def _read(self, connection: _Connection) -> bool:
        """Once. False: there was nothing, or it is over."""
        try:
            size = connection.socket.recv_into(self._buffer)
            messages = connection.peer.receive(self._view[:size]) if size else None
        except BlockingIOError:
            return False
        except (OSError, ZmtpError) as e:
            self._end(f"the connection of the engine broke: {e}")
            return False
        if messages is None:
            self._lost("the engine closed its connection", connection)
            return False
        if connection.peer.output:
            self._answer(connection)
        for message in messages:
            if self._over:
                return False
            self._take(message)
        return not self._over

    def _answer(self, connection: _Connection) -> None:
        """To a heartbeat."""
        output = connection.peer.take_output()
        if connection is self._requests:
            self._queue.append(output)
            self.flush()
        else:
            with contextlib.suppress(OSError):  # the engine reads nothing else there: there is always room
                connection.socket.send(output)

    # The end

    def _lost(self, reason: str, connection: _Connection | None = None) -> None:
        """What the engine said last may still lie in the other connection."""
        if connection is not self._outputs:
            while not self._over and self._read(self._outputs):
                pass
        self._end(reason)

    def _leave(self) -> None:
        for one in (self._requests, self._outputs):
            self._loop.remove_reader(one.socket.fileno())
            self._loop.remove_writer(one.socket.fileno())
            one.close()


class _Connection:
    """A connection that the engine makes to a path of ours."""

    socket: socket.socket

    def __init__(self, kind: str, accepts: str) -> None:
        self.peer = Peer(kind, accepts)
        self.early: list[list[bytes]] = []
        self._open: list[socket.socket] = []

    async def accept(self, path: Path) -> None:
        """Binds the path, takes the first that comes, greets it, and leaves the path. Raises OSError, ZmtpError."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
            listener.bind(os.fspath(path))
            try:
                listener.listen(1)
                self.socket, _ = await loop.sock_accept(listener)
            finally:
                with contextlib.suppress(FileNotFoundError):  # libzmq was late to remove its own
                    os.unlink(path)
        self._open.append(self.socket)
        while self.peer.stage is not Stage.TRAFFIC:
            await loop.sock_sendall(self.socket, self.peer.take_output())
            data = await loop.sock_recv(self.socket, 4096)
            if not data:
                raise ConnectionResetError("the peer left while greeting")
            self.early += self.peer.receive(memoryview(data))

    def close(self) -> None:
        for one in self._open:
            one.close()
