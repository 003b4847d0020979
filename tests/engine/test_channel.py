"""An engine that another process watches: channels come and go, and each slot gets its final record all the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from evap.engine.channel import ChannelReplica, capacity_for, open_fds
from evap.engine.meter import Spec
from evap.engine.torch import wire
from evap.messages import Finish, ReplicaState
from evap.ring import RingWriter
from tests.engine.fake_worker import COUNT, INFO
from tests.engine.test_supervisor import PATIENCE_S, Listener, request

CAPACITY = capacity_for(4)


class Engine:
    """The engine's end of one channel, in this process."""

    def __init__(self, replica: ChannelReplica) -> None:
        import mmap

        from evap.ring import ring_bytes

        ours, self.sock, memory, bell = open_fds(CAPACITY)
        self._bell = os.dup(bell)
        self.ring = RingWriter(mmap.mmap(memory, ring_bytes(CAPACITY)), CAPACITY)
        self.sock.settimeout(PATIENCE_S)
        replica.attach({"capacity": CAPACITY}, INFO, [ours.detach(), memory, bell])

    def tokens(self, slot: int, generation: int, *ids: int, finish: int = 0, first: int = 0) -> None:
        count = len(ids)
        index = range(first, first + count)
        flags = [0] * (count - 1) + [finish]
        self.ring.write([slot] * count, [generation] * count, ids, list(index), flags, 1)
        os.eventfd_write(self._bell, 1)

    async def heard(self) -> list[wire.ToWorker]:
        await asyncio.sleep(0)
        data = await asyncio.to_thread(self.sock.recv, 1 << 16)
        return list(wire.to_worker().feed(data))

    def close(self) -> None:
        self.sock.close()
        os.close(self._bell)


def run(test: Callable[[ChannelReplica, Listener, list[Spec | None]], Awaitable[None]]) -> None:
    async def main() -> None:
        asked: list[Spec | None] = []
        replica = ChannelReplica(asked.append)
        listener = Listener(replica)  # type: ignore[arg-type]
        await asyncio.wait_for(test(replica, listener, asked), PATIENCE_S)
        await replica.stop()
        assert replica.state is ReplicaState.STOPPED

    asyncio.run(main())


def test_it_asks_for_a_channel_and_is_ready_when_it_has_one() -> None:
    async def test(replica: ChannelReplica, listener: Listener, asked: list[Spec | None]) -> None:
        replica.meters = [{"page": "mine"}]
        with pytest.raises(RuntimeError):
            _ = replica.info
        starting = asyncio.ensure_future(replica.start())
        await asyncio.sleep(0)
        assert asked == [{"page": "mine"}]
        replica.engine_is(ReplicaState.STARTING, "loading")
        replica.engine_is(ReplicaState.READY, "")
        assert ReplicaState.READY not in listener.states  # not without a channel
        engine = Engine(replica)
        await starting
        assert listener.states[-1] is ReplicaState.READY
        assert replica.info == INFO
        replica.submit(3, 1, request(COUNT))
        replica.cancel(3, 2)  # unknown
        replica.cancel(3, 1)
        submit, cancel = await engine.heard()
        assert isinstance(submit, wire.Submit)
        assert (submit.slot, cancel) == (3, wire.Cancel(3, 1))
        engine.tokens(3, 1, 10, 11, finish=Finish.LENGTH)
        assert await listener.end(3, 1) == (Finish.LENGTH, 1)
        assert listener.tokens == {(3, 1): [10, 11]}
        engine.close()

    run(test)


def test_a_channel_that_ends_fails_what_runs_and_another_is_asked_for() -> None:
    async def test(replica: ChannelReplica, listener: Listener, asked: list[Spec | None]) -> None:
        engine = Engine(replica)
        replica.submit(3, 1, request(COUNT))
        engine.tokens(3, 1, 10)
        await listener.until(lambda: (3, 1) in listener.tokens)
        engine.close()
        assert await listener.end(3, 1) == (Finish.ERROR, 1)
        assert replica.state is ReplicaState.FAILED
        assert asked == [None]
        replica.submit(4, 1, request(COUNT))
        assert await listener.end(4, 1) == (Finish.ERROR, 0)
        again = Engine(replica)
        replica.submit(3, 2, request(COUNT))
        again.tokens(3, 2, 10, finish=Finish.STOP)
        assert await listener.end(3, 2) == (Finish.STOP, 0)
        again.close()

    run(test)


def test_what_the_parent_says_of_a_dead_engine_is_enough() -> None:
    async def test(replica: ChannelReplica, listener: Listener, asked: list[Spec | None]) -> None:
        engine = Engine(replica)
        replica.submit(3, 1, request(COUNT))
        engine.tokens(3, 1, 10)  # in the ring, and not read yet
        replica.engine_is(ReplicaState.FAILED, "killed")
        assert await listener.end(3, 1) == (Finish.ERROR, 1)
        assert "killed" in listener.lines
        engine.close()

    run(test)


def test_the_parent_attaches_a_process_to_a_real_engine() -> None:
    """Two replicas in this process, one engine in another: the parent's own, and one with a channel."""
    from pathlib import Path

    from evap.config import EngineConfig
    from evap.engine.supervisor import TorchReplica

    async def main() -> None:
        parent = TorchReplica(EngineConfig(max_running=4), Path("good"), module="tests.engine.fake_worker")
        own = Listener(parent)
        replica = ChannelReplica(lambda _meter: None)
        listener = Listener(replica)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(parent.start(), PATIENCE_S)
            ours, theirs, memory, bell = open_fds(parent.capacity)
            mine = os.dup(memory), os.dup(bell)
            parent.attach(theirs, memory, bell, None)
            replica.attach({"capacity": parent.capacity}, parent.info, [ours.detach(), *mine])
            for one in (parent, replica):
                one.submit(0, 0, request(COUNT, 50))
            assert await own.end(0, 0) == (Finish.LENGTH, 49)
            assert await listener.end(0, 0) == (Finish.LENGTH, 49)
            replica.submit(1, 0, request(COUNT, 1 << 30))
            await listener.until(lambda: len(listener.tokens.get((1, 0), ())) > 3)
            assert parent.pid is not None
            os.kill(parent.pid, 9)
            finish, _ = await listener.end(1, 0)
            assert finish is Finish.ERROR
        finally:
            await asyncio.wait_for(parent.stop(), PATIENCE_S)
            await replica.stop()

    asyncio.run(main())
