"""Several processes at one engine: each gets its own records, and one that is gone or stuck hurts nobody."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from evap.engine.meter import Spec
from evap.engine.torch import links as module
from evap.engine.torch import wire
from evap.engine.torch.links import Link, Links
from evap.engine.torch.worker import run
from evap.messages import FINISH_MASK, NO_TOKEN, Finish
from tests.clients.asking import eventually
from tests.engine.fake_worker import COUNT, FakeEngine
from tests.engine.test_supervisor import PATIENCE_S, request
from tests.engine.torch.way import Way

CAPACITY = 64


class Engine(FakeEngine):
    """Notes who was attached, and what was cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[tuple[int, Spec | None]] = []
        self.gone: list[int] = []
        self.cancelled: list[tuple[int, int]] = []

    def attach(self, base: int, meter: Spec | None) -> None:
        self.pages.append((base, meter))

    def detach(self, base: int) -> None:
        self.gone.append(base)

    def cancel(self, slot: int, generation: int) -> None:
        self.cancelled.append((slot, generation))
        super().cancel(slot, generation)


class End(Way):
    """A process's end of a way to the engine."""

    def __init__(self) -> None:
        super().__init__(CAPACITY)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Finish] = {}

    def say(self, message: wire.ToWorker) -> None:
        self.sock.sendall(wire.frame(message))

    def read(self, slot: int) -> None:
        """Until a slot has ended."""
        while slot not in self.ends:
            assert select.select([self.bell], [], [], PATIENCE_S)[0]
            os.eventfd_read(self.bell)
            while (batch := self.ring.poll()) is not None:
                for own, token, flags in zip(
                    batch.slot.tolist(), batch.token.tolist(), batch.flags.tolist(), strict=True
                ):
                    if not flags & NO_TOKEN:
                        self.tokens.setdefault(own, []).append(token)
                    if flags & FINISH_MASK:
                        self.ends[own] = Finish(flags & FINISH_MASK)

    def logprobs(self) -> list[wire.LogprobEntry]:
        [batch] = self._frames.feed(self.sock.recv(1 << 16))
        assert isinstance(batch, wire.LogprobBatch)
        return batch.entries

    def close(self) -> None:
        for sock in (self.sock, self.theirs):
            sock.close()
        for fd in (self.memory, self.bell):
            os.close(fd)


class Bench:
    """An engine in a thread, its parent's end, and those of others."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.parent = End()
        self.link = Link(self.parent.theirs.fileno(), self.parent.memory, self.parent.bell)
        self.link.open_ring(CAPACITY)
        self.lingers: list[float] = []
        self.links = Links(self.link, self.lingers.append)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.others: list[End] = []

    def _run(self) -> None:
        with contextlib.suppress(EOFError):  # nobody is left
            run(self.engine, self.links)

    def attach(self, meter: Spec | None = None) -> End:
        other = End()
        fds = [other.theirs.fileno(), other.memory, other.bell]
        socket.send_fds(self.parent.sock, [wire.frame(wire.Attach(CAPACITY, meter, 7.0))], fds)
        other.theirs.close()
        self.others.append(other)
        return other

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the parent has gone before
            self.parent.say(wire.Stop())
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.links.close()
        self.link.close()
        for end in (self.parent, *self.others):
            end.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    it = Bench()
    yield it
    it.close()


def test_the_same_slot_of_two_processes_and_of_the_parent(bench: Bench) -> None:
    ends = [bench.attach({"page": "one"}), bench.attach(), bench.parent]
    for number, end in enumerate(ends):
        end.say(wire.pack_request(3, 1, request(COUNT, 5 + number)))
    for number, end in enumerate(ends):
        end.read(3)
        assert end.tokens == {3: [10 + i for i in range(5 + number)]}
        assert end.ends == {3: Finish.LENGTH}
    assert bench.engine.pages == [(1 << 16, {"page": "one"}), (2 << 16, None)]


def test_log_probabilities_go_where_their_tokens_go(bench: Bench) -> None:
    one, other = bench.attach(), bench.attach()
    one.say(wire.pack_request(7, 2, request(COUNT, 1, logprobs=0)))
    other.say(wire.pack_request(7, 2, request(COUNT, 1)))
    one.read(7)
    other.read(7)
    assert [(e.slot, e.generation, e.index) for e in one.logprobs()] == [(7, 2, 0)]


def test_cancel_is_for_the_process_that_says_it(bench: Bench) -> None:
    one, other = bench.attach(), bench.attach()
    one.say(wire.pack_request(0, 0, request(COUNT, 1 << 30)))  # ends in no other way
    other.say(wire.pack_request(0, 0, request(COUNT, 40)))
    one.say(wire.Cancel(0, 0))
    one.read(0)
    assert one.ends[0] is Finish.CANCELLED
    other.read(0)
    assert other.ends[0] is Finish.LENGTH
    assert len(other.tokens[0]) == 40


def test_what_a_dead_process_asked_for_is_cancelled(bench: Bench) -> None:
    one, other = bench.attach(), bench.attach()
    one.say(wire.pack_request(5, 1, request(COUNT, 1 << 30)))
    eventually(lambda: bench.engine.steps > 3, "the engine runs", PATIENCE_S)
    one.sock.close()
    eventually(lambda: bench.engine.gone == [1 << 16], "it is detached", PATIENCE_S)
    assert bench.engine.cancelled == [((1 << 16) + 5, 1)]
    other.say(wire.pack_request(5, 1, request(COUNT, 3)))
    other.read(5)
    assert other.tokens == {5: [10, 11, 12]}


def test_without_a_parent_the_others_finish_and_the_last_one_ends_it(bench: Bench) -> None:
    one, other = bench.attach(), bench.attach()
    one.say(wire.pack_request(5, 1, request(COUNT, 500)))  # more than its ring holds
    eventually(lambda: bench.engine.steps > 3, "the engine runs", PATIENCE_S)
    bench.parent.sock.close()
    one.read(5)
    assert len(one.tokens[5]) == 500
    other.say(wire.pack_request(5, 1, request(COUNT, 3)))  # also what is asked for now
    other.read(5)
    one.sock.close()
    eventually(lambda: bench.engine.gone == [1 << 16], "one has left", PATIENCE_S)
    assert bench.thread.is_alive()
    other.sock.close()
    bench.thread.join(PATIENCE_S)
    assert not bench.thread.is_alive()
    assert bench.lingers == [7.0, 7.0]


def test_nonsense_ends_a_way_and_nothing_else(bench: Bench) -> None:
    one, other = bench.attach(), bench.attach()
    one.sock.sendall(b"\xff" * 100)
    eventually(lambda: bench.engine.gone == [1 << 16], "it is detached", PATIENCE_S)
    other.say(wire.pack_request(5, 1, request(COUNT, 3)))
    other.read(5)


def test_a_process_that_does_not_read_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ring is full: the others wait for it, but not for long."""
    monkeypatch.setattr(module, "STUCK_READER_S", 0.2)
    stuck, other = bench.attach(), bench.attach()
    stuck.say(wire.pack_request(1, 1, request(COUNT, 1 << 30)))
    other.say(wire.pack_request(1, 1, request(COUNT, 500)))
    other.read(1)
    assert len(other.tokens[1]) == 500
    assert bench.engine.gone == [1 << 16]
    assert stuck.sock.recv(1) == b""  # it will know
