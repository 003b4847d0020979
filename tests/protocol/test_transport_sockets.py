"""The shell over real sockets, under both loops: what only a kernel shows."""

from __future__ import annotations

import asyncio

import pytest

from tests.protocol import frames as f
from tests.protocol.joined import HIGH_WATER, split
from tests.protocol.serving import LOOPS, App, Wire, run, serving, until

STREAM = [*f.GET[:3], (b":path", b"/stream")]
both = pytest.mark.parametrize("loop", LOOPS)


@both
def test_many_streams_over_tcp(loop: str) -> None:
    async def test() -> None:
        app = App()
        async with serving(app) as (hub, port):
            wires = [await Wire.connect(port) for _ in range(5)]
            for wire in wires:
                wire.send(f.hello(), *[f.headers(sid, STREAM, end=True) for sid in range(1, 41, 2)])
            await until(lambda: len(app.streams) == 100)
            for number in range(10):
                for reply in app.streams:
                    reply.send(b"<%d>" % number)
                await asyncio.sleep(0)
            for reply in app.streams:
                reply.end()
            for wire in wires:
                wire.send(f.goaway())
                got: dict[int, bytes] = {}
                for out in split(await wire.rest()):
                    if out.type == f.DATA:
                        got[out.sid] = got.get(out.sid, b"") + out.payload
                assert got == {sid: b"".join(b"<%d>" % n for n in range(10)) for sid in range(1, 41, 2)}
                await wire.close()
            await until(lambda: hub.shared.connections == 0)

    run(loop, test)


@both
def test_a_client_that_vanishes_is_noticed_in_silence(loop: str) -> None:
    async def test() -> None:
        app = App()
        async with serving(app) as (_, port):
            for abort in (False, True):
                wire = await Wire.connect(port)
                wire.send(f.hello(), f.headers(1, STREAM, end=True))
                await wire.read_until(b"text/event-stream")
                if abort:
                    wire.writer.transport.abort()
                else:
                    await wire.close()
                await until(lambda: app.cancelled)
                assert app.cancelled == ["client_gone"]
                app.cancelled.clear()

    run(loop, test)


@both
def test_a_reader_that_stops_holds_a_bounded_buffer(loop: str) -> None:
    async def test() -> None:
        app = App()
        async with serving(app, stall_timeout_s=0.2) as (hub, port):
            wire = await Wire.connect(port)
            wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
            wire.send(f.hello((4, 1 << 30)), f.window(0, 1 << 30), f.headers(1, STREAM, end=True))
            await until(lambda: app.streams)
            for _ in range(64):
                app.streams[0].send(bytes(1 << 20))
            await asyncio.sleep(0)
            most = 0
            while not app.cancelled:
                most = max(most, hub.unsent)
                await asyncio.sleep(0.002)
            assert app.cancelled == ["stalled"]
            assert most < 2 * HIGH_WATER
            await wire.close()

    run(loop, test)
