"""The real shell on a loopback port, under either loop, with a small application behind it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvloop

from evap.protocol.events import Event, Reply, RequestReady, StreamCancelled
from evap.protocol.transport import Hub
from tests.protocol.joined import configured

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class App:
    """/echo gives the body back; /stream sends what `tokens` is told to; /big sends a megabyte; /bug raises."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.streams: list[Reply] = []
        self.cancelled: list[str] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, StreamCancelled):
            self.cancelled.append(event.reason)
        if not isinstance(event, RequestReady):
            return
        if event.head.path == "/bug":
            raise RuntimeError("a bug in the application")
        if event.head.path == "/stream":
            event.reply.start(200, [(b"content-type", b"text/event-stream")])
            self.streams.append(event.reply)
        elif event.head.path == "/big":
            event.reply.whole(200, [], bytes(1 << 20))
        else:
            assert isinstance(event.body, bytes)
            event.reply.whole(200, [], event.body or b"hello")


def run(loop: str, test: Callable[[], Awaitable[None]]) -> None:
    """One test coroutine on a fresh loop of that kind; anything the loop's exception handler hears fails it."""
    errors: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with asyncio.timeout(30):
            await test()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())
    assert errors == []


@contextlib.asynccontextmanager
async def serving(app: App, tls: ssl.SSLContext | None = None, **changes: Any) -> AsyncIterator[tuple[Hub, int]]:
    loop = asyncio.get_running_loop()
    hub = Hub(configured(**changes), on_event=app.on_event, loop=loop)
    server = await loop.create_server(hub.protocol, "127.0.0.1", 0, ssl=tls)
    try:
        yield hub, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        hub.close()
        await until(lambda: not hub.live)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something is so; the test's own timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - conditions of plain objects that know no event
        await asyncio.sleep(0.002)


class Wire:
    """A client of raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.got = b""

    @classmethod
    async def connect(cls, port: int, tls: ssl.SSLContext | None = None) -> Wire:
        name = "localhost" if tls is not None else None
        return cls(*await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name))

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    async def read_until(self, needle: bytes) -> bytes:
        while needle not in self.got:
            data = await self.reader.read(65_536)
            assert data, f"closed before {needle!r} came: {self.got[-200:]!r}"
            self.got += data
        return self.got

    async def rest(self) -> bytes:
        """What comes until the server closes."""
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65_536):
                self.got += data
        return self.got

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()
