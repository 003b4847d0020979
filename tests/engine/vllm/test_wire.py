"""The engine's connections taken over from libzmq, with peers of libzmq itself: what they send and how they die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from evap.engine.vllm.zmtp import Peer, Stage, pieces
from tests.engine.vllm.live import NEEDS_VLLM
from tests.engine.vllm.rig import Rig, exchange, name, rig, run, until

pytestmark = NEEDS_VLLM


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
