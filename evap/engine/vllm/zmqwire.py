"""A wire to the engine core by libzmq: for engines that are not on this machine, or speak something else."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import zmq

from evap.engine.vllm.zmtp import Buffer

#: Messages taken per wake, so that a flood from the engine cannot keep the loop from its other work.
MOST_PER_WAKE: Final = 32
#: libzmq copies messages that are shorter; sharing memory with its thread costs more.
MOST_COPIED: Final = 64 << 10
#: zmq's own are enumerations, whose arithmetic costs more than the call
_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)

Take = Callable[[list[bytes]], None]
Ended = Callable[[str], None]


class Wire(Protocol):
    """Messages to and from one engine, on the loop's thread. `ended` is called at most once, and not after `close`."""

    def send(self, message: Sequence[Buffer]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class EndsOnce:
    """Of every wire: the end is told once, and not after `close`."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._over = False

    def _end(self, reason: str) -> None:
        if not self._over:
            self.close()
            self._ended(reason)

    def close(self) -> None:
        if not self._over:
            self._over = True
            self._leave()

    def _leave(self) -> None:
        """Let go of the connections."""
        raise NotImplementedError


class ZmqWire(EndsOnce):
    """A wire by libzmq. Its descriptor is edge-triggered: it is drained until it would block.

    vLLM closes its sockets on the loop's thread when the engine has died; a duplicate of the descriptor is watched, so
    that a number that was closed and given out again never is.
    """

    def __init__(
        self,
        requests: zmq.Socket[bytes],
        outputs: zmq.Socket[bytes],
        engine: bytes,
        take: Take,
        ended: Ended,
        *,
        owns: bool = False,
    ) -> None:
        super().__init__(ended)
        self._loop = asyncio.get_running_loop()
        self._engine, self._take = engine, take
        self._in, self._out, self._owns = requests, outputs, owns
        self._fd = os.dup(outputs.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)  # what came before the reader was there gave no edge

    def send(self, message: Sequence[Buffer]) -> None:
        send = self._in.send
        try:
            send(self._engine, _NOBLOCK_MORE)
            for part in message[:-1]:
                send(part, _NOBLOCK_MORE, copy=len(part) < MOST_COPIED)
            send(message[-1], _NOBLOCK, copy=len(message[-1]) < MOST_COPIED)
        except zmq.ZMQError as e:
            self._loop.call_soon(self._end, f"the engine takes no requests ({e})")

    def flush(self) -> None:
        """libzmq's thread writes."""

    def _drain(self) -> None:
        if self._over:
            return
        receive, events = self._out.recv_multipart, self._out.getsockopt
        try:
            for _ in range(MOST_PER_WAKE):
                self._take(receive(_NOBLOCK))
                if self._over or not events(_EVENTS) & _POLLIN:  # this also arms the descriptor again
                    return
        except zmq.ZMQError:  # a wake for nothing; or closed, and the end is about to be told
            return
        self._loop.call_soon(self._drain)

    def _leave(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        if self._owns:
            self._in.close()
            self._out.close()


async def bound(context: Any, ends: Sequence[str], seconds: float) -> list[zmq.Socket[bytes]]:
    """New sockets of libzmq at the same ends, when the engine is there again (within `seconds`). Raises OSError."""
    with contextlib.ExitStack() as undo:
        both = [undo.enter_context(zmq.Socket(context, kind)) for kind in (zmq.ROUTER, zmq.PULL)]
        for one, end in zip(both, ends, strict=True):
            for option in (zmq.RCVHWM, zmq.SNDHWM, zmq.LINGER):
                one.setsockopt(option, 0)
            one.bind(end)
        both[0].setsockopt(zmq.ROUTER_MANDATORY, 1)  # it is writable once somebody has come
        if not await until(lambda: bool(both[0].getsockopt(_EVENTS) & _POLLOUT), seconds):
            raise ConnectionError("the engine does not connect again")
        undo.pop_all()
        return both


async def until(true: Callable[[], bool], seconds: float) -> bool:
    """libzmq's threads tell nobody what they have done."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    while not true() and clock() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return true()
