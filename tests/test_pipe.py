"""A pipe between two processes: whole messages, descriptors beside them, and its end; and a child behind one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from evap.pipe import Pipe, PipedChild, pair
from tests.support import TIME_FACTOR

PATIENCE_S = 10.0 * TIME_FACTOR


class Said(msgspec.Struct):
    what: int
    data: bytes = b""


class End:
    """Keeps what it hears."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.heard: list[Any] = []
        self.fds: list[int] = []
        self.ended = 0
        self.news = asyncio.Event()
        self.pipe = Pipe(sock, msgspec.msgpack.Decoder(kind), on_message=self._take, on_end=self._end)

    def _take(self, message: Any, fds: list[int]) -> None:
        self.heard.append(message)
        self.fds += fds
        self.news.set()

    def _end(self) -> None:
        self.ended += 1
        self.news.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.heard) < count and not self.ended:
                self.news.clear()
                await self.news.wait()


def test_descriptors_are_copied_and_stay_with_their_message() -> None:
    async def main() -> None:
        ours, theirs = pair()
        parent, child = End(ours, Said), End(theirs, Said)
        pipes = [os.pipe() for _ in range(3)]
        parent.pipe.send(Said(1))
        parent.pipe.send(Said(2), [reading for reading, _ in pipes])
        for reading, writing in pipes:
            os.write(writing, b"%d" % writing)
            os.close(reading)
        await child.until(2)
        assert [os.read(fd, 10) for fd in child.fds] == [b"%d" % writing for _, writing in pipes]
        for fd in child.fds + [writing for _, writing in pipes]:
            os.close(fd)
        for end in (parent, child):
            end.pipe.close()

    asyncio.run(main())


def test_a_reader_that_is_slow_loses_nothing() -> None:
    async def main() -> None:
        ours, theirs = pair()
        parent = End(ours, Said)
        said = [Said(n, bytes(50_000)) for n in range(60)]
        for message in said:
            parent.pipe.send(message)  # more than the socket holds
        assert 0 < parent.pipe.queued < len(said)
        assert not parent.pipe.takes
        await asyncio.sleep(0.01)
        child = End(theirs, Said)
        await child.until(len(said))
        assert child.heard == said
        assert parent.pipe.queued == 0
        assert parent.pipe.takes
        for end in (parent, child):
            end.pipe.close()
        assert not parent.pipe.takes

    asyncio.run(main())


def test_what_the_system_does_not_take_ends_the_pipe_and_what_was_said_before_is_heard() -> None:
    async def main() -> None:
        ours, theirs = pair()
        parent, child = End(ours, Said), End(theirs, Said)
        child.pipe.send(Said(1))
        parent.pipe.send(Said(2, bytes(8 << 20)))  # no packet is so large
        assert not parent.ended, "not within `send`"
        await parent.until(99)
        assert (parent.heard, parent.ended) == ([Said(1)], 1)
        await child.until(99)
        assert (child.heard, child.ended) == ([], 1)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def child(module: str = "tests.piped_child") -> AsyncIterator[tuple[PipedChild[Said], list[Any], asyncio.Event]]:
    """A child, what is heard of it and of its end, in order, and that it has ended."""
    heard: list[Any] = []
    gone = asyncio.Event()

    def exited(status: int) -> None:
        heard.append(status)
        gone.set()

    it = PipedChild(
        module, msgspec.msgpack.Decoder(Said), on_message=lambda said, _: heard.append(said), on_exit=exited,
        on_end=lambda: heard.append("end"),
    )  # fmt: skip
    try:
        yield it, heard, gone
    finally:
        it.end()
    assert str(it.pid) not in os.listdir("/proc")


def test_what_a_child_said_is_heard_before_its_exit() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), child() as (it, heard, gone):
            it.pipe.send(Said(5))
            await gone.wait()
            assert heard == [*(Said(n) for n in range(5)), "end", 5]
            it.pipe.send(Said(1))  # to nobody

    asyncio.run(main())


def test_a_child_that_is_ended_says_nothing_any_more() -> None:
    async def main() -> None:
        async with child() as (it, heard, _):
            it.pipe.send(Said(3))
            it.end()
            await asyncio.sleep(0.05)
            assert heard == []

    asyncio.run(main())


def test_a_child_that_cannot_start_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    async def main() -> None:
        monkeypatch.setattr(subprocess, "Popen", refuse)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="no more processes"):
            async with child():
                raise AssertionError("it has started")
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(main())
