"""The pipe between a parent and its loop processes: whole messages, descriptors beside them, and its end."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec

from evap import between
from evap.config import Config, EngineConfig, MeterConfig
from evap.messages import EngineInfo
from tests.support import TIME_FACTOR

PATIENCE_S = 10.0 * TIME_FACTOR
INFO = EngineInfo(engine="torch", device="cpu", dtype="float32", max_model_len=99, vocab_size=99, max_running=4)


class End:
    """Keeps what it hears."""

    def __init__(self, sock: Any, kind: Any) -> None:
        self.heard: list[Any] = []
        self.fds: list[int] = []
        self.ended = 0
        self.news = asyncio.Event()
        self.pipe = between.Pipe(sock, msgspec.msgpack.Decoder(kind), on_message=self._take, on_end=self._end)

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


def test_everything_that_is_said_arrives_as_it_was() -> None:
    config = Config(engine=EngineConfig(vllm_arg=("a=b",), synthetic_step_ms=0), meter=MeterConfig(data_dir="/x"))
    start = between.Start(1, 2, config, ("127.0.0.1", 80), [4, 5], 6, 1024, 7, b"secret", (b"cert", b"key"))
    told = [start, between.Engine("ready", "line"), between.Signal(15), between.Question(1, "usage", "id"),
            between.Answer(2, b"data")]  # fmt: skip
    asked = [between.Up("m", True, INFO), between.Want({"page": "x"}), between.Want(None),
             between.Question(3, "metrics"), between.Answer(4, b"")]  # fmt: skip

    async def main() -> None:
        ours, theirs = between.pair()
        parent, child = End(ours, between.FromChild), End(theirs, between.ToChild)
        for message in told:
            parent.pipe.send(message)
        for answer in asked:
            child.pipe.send(answer)
        await child.until(len(told))
        await parent.until(len(asked))
        assert child.heard == told
        assert parent.heard == asked
        parent.pipe.close()
        await child.until(99)
        assert (child.ended, parent.ended) == (1, 0)
        child.pipe.send(between.Want(None))  # to nobody

    asyncio.run(main())


def test_descriptors_are_copied_and_stay_with_their_message() -> None:
    async def main() -> None:
        ours, theirs = between.pair()
        parent, child = End(ours, between.FromChild), End(theirs, between.ToChild)
        pipes = [os.pipe() for _ in range(3)]
        parent.pipe.send(between.Engine("ready", ""))
        parent.pipe.send(between.Way(64, INFO), [reading for reading, _ in pipes])
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
        ours, theirs = between.pair()
        parent = End(ours, between.FromChild)
        said = [between.Answer(n, bytes(50_000)) for n in range(60)]
        for message in said:
            parent.pipe.send(message)  # more than the socket holds
        await asyncio.sleep(0.01)
        child = End(theirs, between.ToChild)
        await child.until(len(said))
        assert child.heard == said
        for end in (parent, child):
            end.pipe.close()

    asyncio.run(main())
