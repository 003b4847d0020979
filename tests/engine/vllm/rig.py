"""vLLM's two sockets, an engine's two made with libzmq, and a wire between; for tests."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

ENGINE = b"\x00\x00"


class Rig:
    """vLLM's two sockets, an engine's two, and what the wire tells."""

    def __init__(self, requests: str, outputs: str, **options: int) -> None:
        import zmq
        import zmq.asyncio

        self.zmq = zmq
        self.context = zmq.Context(io_threads=2)
        own = zmq.asyncio.Context(self.context)
        self.sockets = [own.socket(zmq.ROUTER), own.socket(zmq.PULL)]
        for one, end in zip(self.sockets, (requests, outputs), strict=True):
            one.bind(end)
        self.theirs = zmq.Context()
        self.dealer, self.push = self.theirs.socket(zmq.DEALER), self.theirs.socket(zmq.PUSH)
        self.dealer.setsockopt(zmq.IDENTITY, ENGINE)
        for one, end in zip((self.dealer, self.push), self.sockets, strict=True):
            for option in ("SNDHWM", "RCVHWM"):
                one.setsockopt(getattr(zmq, option), 0)
            for name, value in options.items():
                one.setsockopt(getattr(zmq, name), value)
            one.connect(end.getsockopt(zmq.LAST_ENDPOINT).decode())
        self.dealer.send(b"ready")
        assert zmq.Socket.shadow(self.sockets[0].underlying).recv_multipart() == [ENGINE, b"ready"]
        self.taken: list[list[bytes]] = []
        self.ends: list[str] = []

    async def take_over(self) -> Any:
        from evap.engine.vllm.wire import take_over

        return await take_over(self.context, self.sockets, ENGINE, self.taken.append, self.ends.append)

    def close(self) -> None:
        for one in self.sockets:
            one.close(linger=0)  # as vLLM does
        self.theirs.destroy(linger=0)
        self.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def rig(requests: str, outputs: str, **options: int) -> AsyncIterator[tuple[Rig, Any]]:
    made = Rig(requests, outputs, **options)
    wire = await made.take_over()
    try:
        yield made, wire
    finally:
        wire.close()
        made.close()


def run(test: Callable[[str, str], Awaitable[None]], folder: Path) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(f"ipc://{folder}/requests", f"ipc://{folder}/outputs"), 60)

    asyncio.run(limited())


async def until(true: Callable[[], object]) -> None:
    while not true():  # noqa: ASYNC110  # libzmq's threads tell nobody
        await asyncio.sleep(0.005)


def name(wire: Any) -> str:
    return type(wire).__name__


async def exchange(made: Rig, wire: Any) -> None:
    """Messages of all shapes, both ways, in order and unchanged."""
    fill = random.Random(7)
    bodies = [fill.randbytes(size) for size in (0, 1, 255, 256, 8_183, 8_184, 70_000, 3_000_000)]
    there = [[b"\x00", body] for body in bodies] + [[b"\x01", *bodies]]
    for message in there:
        wire.send(message)
    wire.flush()
    got = await asyncio.to_thread(lambda: [made.dealer.recv_multipart() for _ in there])
    assert got == there
    back = [[body] for body in bodies] + [bodies, bodies[::-1]] + [[bytes((n,))] for n in range(200)]
    for message in back:
        made.push.send_multipart(message)
    await until(lambda: len(made.taken) == len(back))
    assert made.taken == back
    assert made.ends == []
