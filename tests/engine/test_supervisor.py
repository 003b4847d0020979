"""The supervisor over real processes and sockets; the engine in them is a fake one (no torch)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from evap.config import EngineConfig
from evap.engine import supervisor
from evap.engine.supervisor import TorchReplica
from evap.errors import StartupError
from evap.messages import (
    FINISH_MASK,
    HAS_LOGPROBS,
    META,
    NO_TOKEN,
    Finish,
    GenerateRequest,
    ReplicaState,
    SamplingParams,
    TokenBatch,
)
from tests.engine import fake_worker
from tests.support import TIME_FACTOR

PATIENCE_S = 30.0 * TIME_FACTOR


class Listener:
    """Keeps what a replica reports, and waits for more of it."""

    def __init__(self, replica: TorchReplica) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[tuple[int, int], list[tuple[Finish, int]]] = {}
        self.logprobs: list[float] = []
        self.states: list[ReplicaState] = []
        self.lines: list[str] = []
        self._news = asyncio.Event()
        replica.listen(self._batch, self._state)

    def _batch(self, batch: TokenBatch) -> None:
        assert len(batch.logprobs) == int(((batch.flags & HAS_LOGPROBS) != 0).sum())
        self.logprobs += [entry.logprob for entry in batch.logprobs.values()]
        for row in range(len(batch)):
            key = int(batch.slot[row]), int(batch.generation[row])
            flags, token, index = int(batch.flags[row]), int(batch.token[row]), int(batch.index[row])
            tokens = self.tokens.setdefault(key, [])
            if not flags & META:
                assert index == len(tokens)
            if not flags & NO_TOKEN:
                tokens.append(token)
            if flags & FINISH_MASK:
                self.ends.setdefault(key, []).append((Finish(flags & FINISH_MASK), index))
        self._news.set()

    def _state(self, state: ReplicaState, line: str) -> None:
        self.states.append(state)
        self.lines.append(line)
        self._news.set()

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not ready():
                self._news.clear()
                await self._news.wait()

    async def end(self, slot: int, generation: int) -> tuple[Finish, int]:
        await self.until(lambda: (slot, generation) in self.ends)
        (end,) = self.ends[slot, generation]
        return end


def request(what: int, max_tokens: int = 5, logprobs: int | None = None) -> GenerateRequest:
    return GenerateRequest(prompt_ids=[what], sampling=SamplingParams(max_tokens=max_tokens, logprobs=logprobs))


@asynccontextmanager
async def started(model: str = "good") -> AsyncIterator[tuple[TorchReplica, Listener]]:
    replica = TorchReplica(
        EngineConfig(max_running=4), Path(model), module="tests.engine.fake_worker", first_backoff_s=0.01
    )
    listener = Listener(replica)
    try:
        await asyncio.wait_for(replica.start(), PATIENCE_S)
        yield replica, listener
    finally:
        await asyncio.wait_for(replica.stop(), PATIENCE_S)


def run(test: Callable[[TorchReplica, Listener], object], model: str = "good") -> None:
    async def main() -> None:
        async with started(model) as (replica, listener):
            await test(replica, listener)  # type: ignore[misc]

    asyncio.run(main())


def test_a_life_from_start_to_stop() -> None:
    async def main() -> None:
        async with started() as (replica, listener):
            assert replica.info == fake_worker.INFO
            assert listener.states.count(ReplicaState.READY) == 1
            assert "fake progress" in listener.lines
            replica.submit(3, 1, request(fake_worker.COUNT))
            assert await listener.end(3, 1) == (Finish.LENGTH, 4)
            assert listener.tokens == {(3, 1): [10, 11, 12, 13, 14]}
            pid = replica.pid
            assert pid is not None
        assert listener.states[-1] is ReplicaState.STOPPED
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


def test_the_share_of_the_cache_that_is_held_is_told_with_each_step() -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        assert replica.kv_usage == 0
        replica.submit(0, 0, request(fake_worker.COUNT, 10**9))
        replica.submit(1, 0, request(fake_worker.COUNT, 5))
        await listener.end(1, 0)
        assert replica.kv_usage == 1 / 8
        replica.cancel(0, 0)
        await listener.end(0, 0)
        assert replica.kv_usage == 0

    run(test)


def test_a_long_step_is_told_while_it_lasts() -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        assert (replica.beats, replica.step_since_ns) == (0, 0)
        began = time.monotonic_ns()
        replica.submit(1, 1, request(fake_worker.LONG, 1))
        seen: set[tuple[int, bool]] = set()
        while (1, 1) not in listener.ends:
            seen.add((replica.beats, began <= replica.step_since_ns <= time.monotonic_ns()))
            await asyncio.sleep(0.005)
        assert len({beats for beats, inside in seen if inside}) > 3, "it moves inside of the step"
        assert replica.beats == 10
        await listener.until(lambda: not replica.step_since_ns)
        os.kill(replica.pid or 0, signal.SIGKILL)
        await listener.until(lambda: ReplicaState.FAILED in listener.states)
        assert (replica.beats, replica.step_since_ns) == (0, 0)

    run(test)


def test_many_requests_and_large_prompts_in_one_pass_of_the_loop() -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        for slot in range(50):
            prompt = [fake_worker.COUNT] * 20_000  # together more than a socket buffer holds
            replica.submit(slot, 1, GenerateRequest(prompt_ids=prompt, sampling=SamplingParams(max_tokens=3)))
        await listener.until(lambda: len(listener.ends) == 50)
        assert all(tokens == [10, 11, 12] for tokens in listener.tokens.values())

    run(test)


def test_logprobs_meet_their_tokens() -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        replica.submit(3, 1, request(fake_worker.COUNT, 400, logprobs=1))
        await listener.end(3, 1)
        assert listener.logprobs == [-float(i) for i in range(400)]

    run(test)


def test_a_ring_that_laps_many_times_loses_nothing() -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        for slot in range(8):
            replica.submit(slot, 1, request(fake_worker.COUNT, 5000))
        await listener.until(lambda: len(listener.ends) == 8)
        assert all(len(tokens) == 5000 for tokens in listener.tokens.values())

    run(test)


def test_cancel_is_confirmed_once_and_the_slot_can_be_used_again() -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        replica.submit(3, 1, request(fake_worker.FOREVER, 1 << 30))
        await listener.until(lambda: bool(listener.tokens.get((3, 1))))
        replica.cancel(3, 0)  # not that generation
        replica.cancel(4, 1)  # not that slot
        replica.cancel(3, 1)
        replica.cancel(3, 1)
        finish, index = await listener.end(3, 1)
        assert finish is Finish.CANCELLED
        assert index == len(listener.tokens[3, 1])
        replica.cancel(3, 1)
        replica.submit(3, 2, request(fake_worker.COUNT))
        assert await listener.end(3, 2) == (Finish.LENGTH, 4)

    run(test)


@pytest.mark.parametrize(("what", "reason"), [(fake_worker.EXIT, "SIGKILL"), (fake_worker.RAISE, "ValueError: a bug")])
def test_a_death_fails_what_runs_and_the_next_process_serves_on(
    what: int, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        replica.submit(1, 1, request(fake_worker.FOREVER, 1 << 30))
        await listener.until(lambda: len(listener.tokens.get((1, 1), [])) > 3)
        replica.submit(2, 1, request(what))
        assert (await listener.end(1, 1))[0] is Finish.ERROR
        assert (await listener.end(2, 1))[0] is Finish.ERROR
        assert ReplicaState.FAILED in listener.states
        assert any(reason in line for line in listener.lines)
        await listener.until(lambda: listener.states[-1] is ReplicaState.READY)
        replica.submit(1, 2, request(fake_worker.COUNT))
        assert await listener.end(1, 2) == (Finish.LENGTH, 4)

    run(test)
    assert ("Traceback" in capfd.readouterr().err) == (what == fake_worker.RAISE)


def test_what_is_submitted_while_it_is_down_fails_later_not_at_once() -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        await listener.until(lambda: listener.states[-1] is ReplicaState.FAILED)
        replica.submit(1, 1, request(fake_worker.COUNT))
        assert not listener.ends
        assert await listener.end(1, 1) == (Finish.ERROR, 0)

    run(test)


def test_running_out_of_memory_costs_one_request_not_the_process() -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        pid = replica.pid
        replica.submit(1, 1, request(fake_worker.FOREVER, 1 << 30))
        await listener.until(lambda: bool(listener.tokens.get((1, 1))))
        replica.submit(2, 1, request(fake_worker.OUT_OF_MEMORY))
        assert (await listener.end(2, 1))[0] is Finish.ERROR
        assert (1, 1) not in listener.ends
        assert replica.pid == pid

    run(test)


def test_signals_to_the_whole_group_are_the_parents_to_act_on() -> None:
    async def test(replica: TorchReplica, listener: Listener) -> None:
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGTERM)
        os.kill(replica.pid, signal.SIGINT)
        replica.submit(1, 1, request(fake_worker.COUNT))
        assert await listener.end(1, 1) == (Finish.LENGTH, 4)

    run(test)


def test_an_engine_that_hangs_is_stopped_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 0.2)

    async def main() -> None:
        async with started() as (replica, listener):
            replica.submit(1, 1, request(fake_worker.HANG))
            await asyncio.wait_for(replica.stop(), PATIENCE_S)
            assert listener.states[-1] is ReplicaState.STOPPED
            assert listener.ends[1, 1] == [(Finish.ERROR, 0)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("model", "message", "remedy"), [("refuse", "no such model", "fetch it"), ("die", "status 9", "")]
)
def test_what_can_never_start_says_why(model: str, message: str, remedy: str) -> None:
    async def main() -> None:
        async with started(model):
            pytest.fail("started")

    with pytest.raises(StartupError, match=message) as caught:
        asyncio.run(main())
    assert caught.value.remedy == remedy


def test_info_is_not_there_before_it_is_ready() -> None:
    with pytest.raises(RuntimeError):
        _ = TorchReplica(EngineConfig(), Path("good")).info


def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed cannot tell anybody."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, signal\n"
        "from pathlib import Path\n"
        "from evap.config import EngineConfig\n"
        "from evap.engine.supervisor import TorchReplica\n"
        "async def main():\n"
        "    replica = TorchReplica(EngineConfig(), Path('good'), module='tests.engine.fake_worker')\n"
        "    await replica.start()\n"
        "    print(replica.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        import sys

        parent = await asyncio.create_subprocess_exec(
            sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
        )
        assert parent.stdout is not None
        worker = os.pidfd_open(int(await parent.stdout.readline()))
        try:
            gone = asyncio.Event()
            asyncio.get_running_loop().add_reader(worker, gone.set)
            await asyncio.wait_for(gone.wait(), PATIENCE_S)
        finally:
            asyncio.get_running_loop().remove_reader(worker)
            os.close(worker)
        assert await parent.wait() == -signal.SIGKILL

    asyncio.run(main())
