"""Clients that behave in every way that clients do, over HTTP/2 and HTTP/1.1, in one process.

An actor is a connection with a plan: so many requests, each ending in some way, and then an end of its own. What comes
back completely is checked: the text, and for each exchange the tokens that its record must show.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from typing import Any, Final

from bench.attacks import (
    BLOCK,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    settings,
)
from bench.soak_asks import Ask, Tally

WIDE: Final = (1 << 31) - 1
#: Ways that a connection may end.
BYES: Final = ("close", "close", "close", "abort", "goaway", "leave", "leave")


class Http2Actor(asyncio.Protocol):
    """HTTP/2 with prior knowledge: several streams at once, windows that are wide or tiny."""

    def __init__(self, tally: Tally, chance: random.Random, done: asyncio.Future[None]) -> None:
        self.tally, self.chance, self.done = tally, chance, done
        self.left = chance.choice((1, 5, 20, 60))
        self.at_once = chance.choice((1, 4, 16))
        self.bye = chance.choice(BYES)
        self.window = chance.choice((WIDE, WIDE, WIDE, 65_535, 300))
        self.open: dict[int, Ask] = {}
        self.next_id = 1
        self.rest = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        wide = frame(WINDOW_UPDATE, 0, 0, (WIDE - 65_535).to_bytes(4))
        transport.write(PREFACE + settings((4, self.window)) + wide + self._asks())

    def _asks(self) -> bytes:
        out = []
        while self.left > 0 and len(self.open) < self.at_once and not self.tally.done:
            self.left -= 1
            ask, sid = Ask(self.tally, self.chance), self.next_id
            self.next_id += 2
            out.append(frame(HEADERS, 4, sid, BLOCK) + frame(DATA, 1, sid, ask.sent))
            if ask.end == "reset_now":
                out.append(self._reset(sid, ask))
                continue
            self.open[sid] = ask
            if ask.end == "reset_soon":
                asyncio.get_running_loop().call_later(self.chance.random() / 50, self._give_up, sid)
            elif ask.end == "stall" and self.window == 300:
                asyncio.get_running_loop().call_later(self.chance.random(), self._give_up, sid)
        return b"".join(out)

    def _reset(self, sid: int, ask: Ask) -> bytes:
        self.open.pop(sid, None)
        ask.gone("reset by the client")
        return frame(RST_STREAM, 0, sid, (8).to_bytes(4))

    def _give_up(self, sid: int) -> None:
        ask = self.open.get(sid)
        if ask is not None and not self.transport.is_closing():
            self._go_on(self._reset(sid, ask))

    def data_received(self, data: bytes) -> None:
        data = self.rest + data if self.rest else data
        at, out = 0, []
        while len(data) - at >= 9:
            end = at + 9 + int.from_bytes(data[at : at + 3])
            if end > len(data):
                break
            sid = int.from_bytes(data[at + 5 : at + 9])
            out.append(self._frame(data[at + 3], data[at + 4], sid, data[at + 9 : end]))
            at = end
        self.rest = data[at:]
        self._go_on(b"".join(out))

    def _frame(self, kind: int, flags: int, sid: int, payload: bytes) -> bytes:
        if kind == SETTINGS:
            return b"" if flags & 1 else frame(SETTINGS, 1, 0)
        if kind == PING:
            return b"" if flags & 1 else frame(PING, 1, 0, payload)
        if kind == GOAWAY:
            self.tally.ended[f"GOAWAY {int.from_bytes(payload[4:8])} {payload[8:].decode(errors='replace')}"] += 1
            return b""
        ask = self.open.get(sid)
        if ask is None:
            return b""
        if kind == RST_STREAM:
            del self.open[sid]
            code = int.from_bytes(payload)
            ask.gone(f"reset by the server, code {code}")
            return b""
        credit = b""
        if kind == HEADERS and not ask.status:
            ask.status = status_of(payload)
        elif kind == DATA:
            ask.body += payload
            if ask.end == "reset_at_first":
                return self._reset(sid, ask)
            credit = self._credit(sid, ask, len(payload))
        if flags & 1:
            del self.open[sid]
            ask.finished()
        return credit

    def _credit(self, sid: int, ask: Ask, size: int) -> bytes:
        """A client with a tiny window opens it for what it took; one that stalls does not."""
        if self.window > 65_535 or not size or ask.end == "stall":
            return b""
        return frame(WINDOW_UPDATE, 0, sid, size.to_bytes(4))

    def _go_on(self, out: bytes) -> None:
        if self.transport.is_closing():
            return
        out += self._asks()
        if self.bye == "leave" and self.left <= 0 and len(self.open) <= 1 + self.at_once // 2:
            self._leave(abort=self.chance.random() < 0.5)
            return
        if self.window == 300 and self.open and all(ask.end == "stall" for ask in self.open.values()):
            pass  # they are given up by their timers
        if out:
            self.transport.write(out)
        if not self.open and (self.left <= 0 or self.tally.done):
            if self.bye == "goaway":
                self.transport.write(frame(GOAWAY, 0, 0, bytes(8)))
            else:
                self._leave(abort=self.bye == "abort")

    def _leave(self, *, abort: bool) -> None:
        if abort:
            self.transport.abort()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for ask in self.open.values():
            ask.gone("the connection ended")
        self.open.clear()
        if not self.done.done():
            self.done.set_result(None)


INDEXED: Final = {0x88: 200, 0x8C: 400, 0x8D: 404, 0x8E: 500}


def status_of(block: bytes) -> int:
    """:status of a block of ours: indexed, or the literal that begins it (after a table size update)."""
    block = block.removeprefix(b"\x20")
    if block[0] in INDEXED:
        return INDEXED[block[0]]
    from hpack import Decoder  # noqa: PLC0415 - the rare way

    return int(dict(Decoder().decode(block, raw=True))[b":status"])


class Http1Actor:
    """HTTP/1.1, keep-alive: one request at a time, sometimes slow to read, sometimes gone in the middle."""

    def __init__(self, tally: Tally, chance: random.Random, port: int) -> None:
        self.tally, self.chance, self.port = tally, chance, port

    async def run(self) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError as error:
            self.tally.fault(f"connect: {error!r}")
            return
        try:
            for _ in range(self.chance.choice((1, 3, 10))):
                if self.tally.done or not await self._one(reader, writer):
                    break
        finally:
            if self.chance.random() < 0.3:
                writer.transport.abort()
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False when the connection is not to be used again."""
        ask = Ask(self.tally, self.chance)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: {len(ask.sent)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + ask.sent)
        if ask.end in ("reset_now", "reset_soon", "stall"):
            await asyncio.sleep({"reset_now": 0.0, "reset_soon": 0.005, "stall": 0.2}[ask.end])
            if ask.end != "stall":
                ask.gone("left by the client")
                return False
        try:
            await self._read(ask, reader)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            ask.gone(f"the connection ended, {type(error).__name__}")
            return False
        if ask.end == "reset_at_first":
            ask.gone("left by the client")
            return False
        ask.finished()
        return ask.status == 200

    async def _read(self, ask: Ask, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        ask.status = int(head[9:12])
        lower = head.lower()
        if b"transfer-encoding: chunked" not in lower:
            size = int(lower.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
            ask.body += await reader.readexactly(size)
            return
        while size := int(await reader.readuntil(b"\r\n"), 16):
            ask.body += (await reader.readexactly(size + 2))[:-2]
            if ask.end == "reset_at_first":
                return
        await reader.readexactly(2)


async def clients(port: int, tally: Tally, at_once: int, seed: int, progress: Callable[[], None]) -> None:
    """So many actors at a time, until the tally is full; every second `progress`."""
    chance, loop = random.Random(seed), asyncio.get_running_loop()

    async def lane() -> None:
        while not tally.done:
            if chance.random() < 0.2:
                await Http1Actor(tally, chance, port).run()
                continue
            done: asyncio.Future[None] = loop.create_future()
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setblocking(False)
            await loop.create_connection(lambda done=done: Http2Actor(tally, chance, done), sock=sock)  # type: ignore[misc]
            await done

    async def watch() -> None:
        while True:
            await asyncio.sleep(1)
            progress()

    watcher = loop.create_task(watch())
    try:
        await asyncio.gather(*(lane() for _ in range(at_once)))
    finally:
        watcher.cancel()
