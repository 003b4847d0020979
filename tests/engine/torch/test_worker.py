"""The worker's loop over a real socket, ring and doorbell, in this process; and the whole thing as a process."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evap.config import EngineConfig
from evap.engine.supervisor import TorchReplica
from evap.engine.torch import wire
from evap.engine.torch import worker as module
from evap.engine.torch.links import Link, Links, publish
from evap.engine.torch.records import Records
from evap.engine.torch.worker import main, run
from evap.errors import StartupError
from evap.messages import Finish, GenerateRequest, ReplicaState, TokenLogprobs
from tests.clients.asking import eventually
from tests.engine.fake_worker import COUNT, FakeEngine, build
from tests.engine.test_supervisor import PATIENCE_S, Listener, request
from tests.engine.torch.tiny import Maker, greedy, prompts, reference
from tests.engine.torch.way import Way
from tests.support import ROOT, TIME_FACTOR

CAPACITY = 8


class Ends(Way):
    """The supervisor's ends of a link, and the worker's."""

    def __init__(self) -> None:
        super().__init__(CAPACITY)
        self.fds = [str(fd) for fd in (self.theirs.fileno(), self.memory, self.bell)]
        self.link = Link(self.theirs.fileno(), self.memory, self.bell)

    def say(self, *messages: wire.ToWorker) -> None:
        self.sock.sendall(b"".join(map(wire.frame, messages)))

    def hear(self, count: int) -> list[wire.FromWorker]:
        heard: list[wire.FromWorker] = []
        while len(heard) < count:
            heard += self._frames.feed(self.sock.recv(1 << 16))
        return heard

    def rung(self) -> bool:
        return bool(select.select([self.bell], [], [], 0)[0])

    def close(self) -> None:
        for end in (self.sock, self.theirs, self.link):
            end.close()
        os.close(self.memory)
        os.close(self.bell)


@pytest.fixture
def ends() -> Iterator[Ends]:
    it = Ends()
    yield it
    it.close()


@pytest.fixture(autouse=True)
def _keep_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` gives the process it runs in other signal handlers and a deadly bond with its parent."""
    monkeypatch.setattr(module, "_die_with_parent", lambda: None)


BOOT = wire.Boot(EngineConfig(), "good", CAPACITY)


def test_commands_are_read_whole_and_only_waited_for_when_asked(ends: Ends) -> None:
    assert ends.link.receive(wait=False) == []
    data = wire.frame(wire.Cancel(1, 2)) + wire.frame(wire.Stop())
    ends.sock.sendall(data[:-3])
    assert ends.link.receive(wait=True) == [wire.Cancel(1, 2)]
    ends.sock.sendall(data[-3:])
    assert ends.link.receive(wait=True) == [wire.Stop()]
    ends.sock.close()
    with pytest.raises(EOFError):
        ends.link.receive(wait=True)


def test_what_comes_with_boot_is_not_lost(ends: Ends) -> None:
    ends.say(BOOT, wire.Cancel(1, 2))
    assert ends.link.boot() == BOOT
    assert ends.link.receive(wait=True) == [wire.Cancel(1, 2)]


def test_logprobs_are_on_the_socket_and_tokens_in_the_ring_before_the_bell(ends: Ends) -> None:
    ring = ends.link.open_ring(CAPACITY)
    publish(Records(), 1, ring, ends.link)
    assert not ends.rung()
    records = Records()
    records.add(3, 1, 99, 0, 0x20)
    records.logprobs.append(wire.LogprobEntry(3, 1, 0, TokenLogprobs(-1.0)))
    publish(records, 1, ring, ends.link)
    assert ends.rung()
    assert ends.hear(1) == [wire.LogprobBatch(records.logprobs)]
    batch = ends.ring.poll()
    assert batch is not None
    assert (batch.slot[0], batch.token[0], batch.step) == (3, 99, 1)


def test_more_records_than_the_ring_holds_wait_for_the_reader(ends: Ends) -> None:
    ring = ends.link.open_ring(CAPACITY)
    records = Records()
    for slot in range(30):
        records.add(slot, 1, 0, 0, 0x13)
    thread = threading.Thread(target=publish, args=(records, 1, ring, ends.link))
    thread.start()
    slots: list[int] = []
    while len(slots) < 30:
        assert select.select([ends.bell], [], [], PATIENCE_S)[0]
        os.eventfd_read(ends.bell)
        while (batch := ends.ring.poll()) is not None:
            slots += batch.slot.tolist()
    thread.join(PATIENCE_S)
    assert slots == list(range(30))
    assert ends.ring.lost == 0


def test_it_never_overruns_a_reader_that_sleeps(ends: Ends) -> None:
    ring = ends.link.open_ring(CAPACITY)
    thread = threading.Thread(target=run, args=(FakeEngine(), Links(ends.link)))
    thread.start()
    ends.say(wire.pack_request(3, 1, request(COUNT, 100)))
    tokens: list[int] = []
    finished = False
    while not finished:
        assert select.select([ends.bell], [], [], PATIENCE_S)[0]
        if ring.room() > 1:  # let it fill up first
            continue
        os.eventfd_read(ends.bell)
        while (batch := ends.ring.poll(3)) is not None:
            tokens += batch.token[batch.flags < 0x80].tolist()
            finished = finished or bool((batch.flags & 0x0F).any())
        finished = finished or len(tokens) > 90  # the rest does not fill the ring any more
    ends.say(wire.Stop())
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert ends.ring.lost == 0
    assert tokens == [10 + i for i in range(len(tokens))]


def test_main_says_what_happens_and_how_it_ends(ends: Ends) -> None:
    ends.say(BOOT, wire.Stop())
    assert main(ends.fds, build) == 0
    progress, ready = ends.hear(2)
    assert progress == wire.Progress("fake progress")
    assert isinstance(ready, wire.Ready)


def test_main_reports_what_a_person_can_mend(ends: Ends) -> None:
    ends.say(wire.Boot(EngineConfig(), "refuse", CAPACITY))
    assert main(ends.fds, build) == 1
    assert ends.hear(2)[1] == wire.Fatal("no such model", "fetch it")


def test_main_reports_a_bug_with_its_trace(ends: Ends, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*args: object) -> FakeEngine:
        raise ValueError("a bug")

    ends.say(BOOT)
    assert main(ends.fds, broken) == 1
    assert ends.hear(1) == [wire.Fatal("ValueError: a bug")]
    assert "Traceback" in capsys.readouterr().err


def test_main_ends_when_its_parent_is_gone(ends: Ends) -> None:
    ends.sock.close()
    assert main(ends.fds, build) == 2


def test_a_real_model_in_a_process_of_its_own(make: Maker) -> None:
    model, path = make()
    asked = prompts(3)

    async def life() -> Listener:
        config = EngineConfig(dtype="float32", threads=1, kv_cache_mb=4, max_running=4)
        replica = TorchReplica(config, path)
        listener = Listener(replica)
        await asyncio.wait_for(replica.start(), 4 * PATIENCE_S)
        try:
            for slot, prompt in enumerate(asked):
                replica.submit(slot, 1, GenerateRequest(prompt_ids=prompt, sampling=greedy(logprobs=1)))
            for slot in range(3):
                assert await listener.end(slot, 1) == (Finish.LENGTH, 23)
        finally:
            await replica.stop()
        assert listener.states[-1] is ReplicaState.STOPPED
        return listener

    listener = asyncio.run(life())
    assert listener.tokens == {(slot, 1): reference(model, prompt) for slot, prompt in enumerate(asked)}
    assert len(listener.logprobs) == 3 * 24


def test_a_directory_without_a_model_is_a_startup_error(tmp_path: Path) -> None:
    async def life() -> None:
        replica = TorchReplica(EngineConfig(), tmp_path)
        try:
            await asyncio.wait_for(replica.start(), 4 * PATIENCE_S)
        finally:
            await replica.stop()

    with pytest.raises(StartupError, match=r"config\.json"):
        asyncio.run(life())


LINGER = """
import ctypes, os, signal, sys, time
from evap.engine.torch.worker import Linger, _die_with_parent
if os.fork():
    time.sleep(1000)  # the parent, which is killed
_die_with_parent()
if sys.argv[1] != "0":
    Linger()(float(sys.argv[1]))
print(os.getpid(), flush=True)
while True:
    ctypes.CDLL(None).sleep(1000)  # hangs where no Python runs
"""


@pytest.mark.parametrize("seconds", ["0", "0.2", "1000"])
def test_it_outlives_its_parent_only_for_so_long(seconds: str) -> None:
    command = [sys.executable, "-c", LINGER, seconds]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        if seconds == "1000":
            assert engine.is_running()
            assert engine.ppid() != parent.pid
            engine.kill()
        gone = lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE  # noqa: E731
        eventually(gone, "nothing stays behind", 30 * TIME_FACTOR)
