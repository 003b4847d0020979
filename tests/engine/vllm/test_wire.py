"""The engine's connections taken over from libzmq, with peers of libzmq itself: what they send and how they die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from evap.engine.vllm.zmtp import Peer, Stage, pieces
from tests.engine.vllm.live import NEEDS_VLLM

pytestmark = NEEDS_VLLM
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


def test_messages_of_all_shapes_go_both_ways(tmp_path: Path) -> None:
    async def test(requests: str, outputs: str) -> None:
        async with rig(requests, outputs) as (made, wire):
            assert name(wire) == "UnixWire"
            await exchange(made, wire)
            assert os.listdir(tmp_path) == [], "the paths have served"

    run(test, tmp_path)


def test_a_message_that_came_before_is_not_lost(tmp_path: Path) -> None:
    async def test(requests: str, outputs: str) -> None:
        made = Rig(requests, outputs)
        made.push.send_multipart([b"early", b"bird"])
        await until(lambda: made.sockets[1].getsockopt(made.zmq.EVENTS) & made.zmq.POLLIN)
        wire = await made.take_over()
        made.push.send(b"later")
        await until(lambda: len(made.taken) == 2)
        assert made.taken == [[b"early", b"bird"], [b"later"]]
        wire.close()
        made.close()

    run(test, tmp_path)


def test_an_engine_elsewhere_stays_with_libzmq() -> None:
    async def test() -> None:
        async with rig("tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as (made, wire):
            assert name(wire) == "ZmqWire"
            await exchange(made, wire)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_stranger_on_the_path_leads_back_to_libzmq(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It knocks all the time, so it is quicker than the engine, which pauses before it connects again."""

    def intrude(over: threading.Event) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(tmp_path / "outputs"))
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: somebody.who.has.nothing.to.do.with.an.engine\r\n\r\n")
            time.sleep(0.002)

    async def test(requests: str, outputs: str) -> None:
        made, over = Rig(requests, outputs, RECONNECT_IVL=300), threading.Event()
        thread = threading.Thread(target=intrude, args=(over,))
        thread.start()
        wire = await made.take_over()
        over.set()
        thread.join()
        assert name(wire) == "ZmqWire"
        assert "the engine's sockets stay with libzmq" in caplog.text
        await exchange(made, wire)
        wire.close()
        made.close()

    run(test, tmp_path)


def test_heartbeats_are_answered(tmp_path: Path) -> None:
    async def test(requests: str, outputs: str) -> None:
        beats = {"HEARTBEAT_IVL": 30, "HEARTBEAT_TIMEOUT": 150, "RECONNECT_IVL": 100}
        async with rig(requests, outputs, **beats) as (made, wire):
            assert name(wire) == "UnixWire"
            await asyncio.sleep(0.8)
            await exchange(made, wire)  # without answers the engine would have closed both

    run(test, tmp_path)


def test_an_engine_that_does_not_read_makes_nothing_wait_and_loses_nothing(tmp_path: Path) -> None:
    async def test(requests: str, outputs: str) -> None:
        made = Rig(requests, outputs)
        wire = await made.take_over()
        many = [[b"\x00", bytes((n & 0xFF,)) * 50_000] for n in range(400)]
        for message in many:
            wire.send(message)
            wire.flush()
        assert wire._rest is not None, "20 MB fit into no socket"
        await asyncio.sleep(0.01)
        got = await asyncio.to_thread(lambda: [made.dealer.recv_multipart() for _ in many])
        assert got == many
        await until(lambda: wire._rest is None)
        wire.send([b"\x00", b"after"])
        wire.flush()
        assert await asyncio.to_thread(made.dealer.recv_multipart) == [b"\x00", b"after"]
        wire.close()
        made.close()

    run(test, tmp_path)


@pytest.mark.parametrize("which", ["dealer", "push"])
def test_the_end_of_either_connection_is_told_once(tmp_path: Path, which: str) -> None:
    async def test(requests: str, outputs: str) -> None:
        async with rig(requests, outputs) as (made, wire):
            made.push.send(b"last words")
            await until(lambda: made.taken)
            getattr(made, which).close(linger=0)
            await until(lambda: made.ends)
            wire.send([b"\x00", b"nobody hears this"])
            wire.flush()
            await asyncio.sleep(0.05)
            assert made.ends == ["the engine closed its connection"]

    run(test, tmp_path)


@pytest.mark.parametrize("first", ["dealer", "push"])
def test_last_words_come_before_the_end(tmp_path: Path, first: str) -> None:
    """Whichever connection ends first, as far as we see."""

    async def test(requests: str, outputs: str) -> None:
        async with rig(requests, outputs) as (made, _wire):
            for n in range(3):
                made.push.send(bytes((n,)) * 9_000)
            time.sleep(0.3)  # noqa: ASYNC251  # all of it lies in the sockets, and nobody reads
            getattr(made, first).close(linger=4000)
            time.sleep(0.1)  # noqa: ASYNC251
            await until(lambda: made.ends)
            assert [len(message[0]) for message in made.taken] == [9_000] * 3

    run(test, tmp_path)


def test_nothing_is_told_after_close(tmp_path: Path) -> None:
    async def test(requests: str, outputs: str) -> None:
        async with rig(requests, outputs) as (made, wire):
            wire.close()
            made.push.send(b"late")
            made.push.close(linger=100)
            await asyncio.sleep(0.1)
            assert (made.taken, made.ends) == ([], [])

    run(test, tmp_path)


async def by_hand(path: str, kind: str, accepts: str) -> socket.socket:
    """An engine's end of a connection that a test can break as it likes."""
    loop, made = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
    made.setblocking(False)
    while True:
        with contextlib.suppress(OSError):
            await loop.sock_connect(made, path)
            break
        await asyncio.sleep(0.005)
    peer = Peer(kind, accepts)
    while peer.stage is not Stage.TRAFFIC or peer.output:
        await loop.sock_sendall(made, peer.take_output())
        if peer.stage is not Stage.TRAFFIC:
            peer.receive(memoryview(await loop.sock_recv(made, 4096)))
    return made


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (b"".join(pieces([b"x" * 9_000]))[:5_000], "the engine closed its connection"),
        (b"\x02\x00", "the engine closed its connection"),
        (b"\xff\xff\xff", "the connection of the engine broke: a frame with flags 0xff"),
    ],
)
def test_a_peer_that_dies_within_a_frame(tmp_path: Path, last: bytes, told: str) -> None:
    from evap.engine.vllm.wire import UnixWire

    async def test(requests: str, outputs: str) -> None:
        paths = [Path(end.removeprefix("ipc://")) for end in (requests, outputs)]
        taken: list[list[bytes]] = []
        ends: list[str] = []
        wire, dealer, push = await asyncio.gather(
            UnixWire.bind(paths, b"", taken.append, ends.append),
            by_hand(str(paths[0]), "DEALER", "ROUTER"),
            by_hand(str(paths[1]), "PUSH", "PULL"),
        )
        push.sendall(b"".join(pieces([b"whole"])) + last)
        push.close()
        await until(lambda: ends)
        assert taken == ([[b"whole"]] if "flags" not in told else [])
        assert ends == [told]
        dealer.close()
        wire.close()

    run(test, tmp_path)


def test_an_engine_of_another_name_is_refused(tmp_path: Path) -> None:
    from evap.engine.vllm.wire import UnixWire
    from evap.engine.vllm.zmtp import ZmtpError

    async def test(requests: str, outputs: str) -> None:
        paths = [Path(end.removeprefix("ipc://")) for end in (requests, outputs)]
        binding = asyncio.ensure_future(UnixWire.bind(paths, b"\x01\x00", print, print))
        ends = [await by_hand(str(paths[0]), "DEALER", "ROUTER"), await by_hand(str(paths[1]), "PUSH", "PULL")]
        with pytest.raises(ZmtpError, match="an engine named b''"):
            await binding
        for end in ends:
            end.close()

    run(test, tmp_path)
