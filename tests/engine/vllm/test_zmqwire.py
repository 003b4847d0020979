"""Where the engine's connections stay with libzmq: it is elsewhere, or its path has been taken by somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.engine.vllm.live import NEEDS_VLLM
from tests.engine.vllm.rig import Rig, exchange, name, rig, run

pytestmark = NEEDS_VLLM


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


def test_the_end_of_a_closed_wire_is_silent() -> None:
    async def test() -> None:
        async with rig("tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as (made, wire):
            wire.close()
            made.push.send(b"late")
            await asyncio.sleep(0.1)
            wire.close()
            assert (made.taken, made.ends) == ([], [])

    asyncio.run(asyncio.wait_for(test(), 60))
