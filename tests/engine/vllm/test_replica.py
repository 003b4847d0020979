"""Lifecycle: starts that fail in one line, a death under load, the return, the stop, and ten thousand resets."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from evap.config import EngineConfig
from evap.engine.vllm.replica import VllmReplica
from evap.errors import OUTDATED, StartupError
from evap.messages import Finish, ReplicaState
from tests.clients.asking import eventually
from tests.engine.vllm.live import NEEDS_VLLM, Live, ask, config, engine, prepare_environment

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def mortal(tiny: Path) -> Iterator[Live]:
    with engine(tiny) as live:
        yield live


def test_before_the_start() -> None:
    replica = VllmReplica(EngineConfig(), Path("/nowhere"))
    assert replica.state is ReplicaState.STARTING
    with pytest.raises(RuntimeError):
        _ = replica.info


def test_progress_and_facts(mortal: Live) -> None:
    lines = [line for state, line in mortal.states if state is ReplicaState.STARTING]
    assert lines[0] == "loading vLLM"
    for wanted in ("loading weights", "KV cache for", "engine initialised"):
        assert any(line.startswith(wanted) for line in lines), lines
    assert mortal.states[-1] == (ReplicaState.READY, "ready")
    info = mortal.replica.info
    assert (info.engine, info.max_model_len, info.vocab_size, info.max_running) == ("vllm", 2048, 2048, 64)
    assert info.kv_tokens > 2048


def test_ten_thousand_resets_leave_nothing(mortal: Live) -> None:
    """Requests cancelled at once, in the next pass, or after the engine has begun: tables and memory return."""
    mortal.generate(*[ask(range(2, 50), n=4) for _ in range(64)])
    own, core = psutil.Process(), psutil.Process(mortal.replica.pids()[0])

    def round_of(number: int) -> None:
        keys = mortal.submit([ask(range(2, 50), n=1000) for _ in range(100)])
        if number % 3:
            mortal.do(lambda: None)
        if number % 3 == 2:
            mortal.wait(keys[:1], lambda r: len(r.tokens) > 0)
        mortal.do(lambda: [mortal.replica.cancel(*key) for key in keys] and None)
        assert {r.finish for r in mortal.results(keys)} == {Finish.CANCELLED}

    for number in range(20):
        round_of(number)
    before = own.memory_info().rss, core.memory_info().rss
    for number in range(80):
        round_of(number)
    assert mortal.replica.running == 0
    assert len(mortal.replica._runs) == 0
    assert not mortal.replica._seam._calls
    after = own.memory_info().rss, core.memory_info().rss
    assert all(b - a < 30 << 20 for a, b in zip(before, after, strict=True)), (before, after)
    mortal.generate(ask(range(2, 1800), n=4))  # all KV blocks are to be had


def test_a_death_ends_every_request_and_the_engine_comes_back(mortal: Live) -> None:
    keys = mortal.submit([ask([n + 2], n=1900) for n in range(50)])
    mortal.wait(keys, lambda r: len(r.tokens) > 2)
    mortal.states.clear()
    os.kill(mortal.replica.pids()[0], signal.SIGKILL)
    assert {r.finish for r in mortal.results(keys)} == {Finish.ERROR}
    assert mortal.replica.running == 0
    assert mortal.replica.state is not ReplicaState.READY
    late = mortal.submit([ask()])
    assert mortal.results(late)[0].finish is Finish.ERROR
    ready = threading.Event()
    for _ in range(6000):
        if mortal.replica.state is ReplicaState.READY:
            break
        ready.wait(0.1)
    assert mortal.states[0][0] is ReplicaState.FAILED
    assert mortal.replica.restarts == 1
    assert len(mortal.generate(ask(n=5))[0].tokens) == 5


def test_an_upgrade_in_place_ends_in_one_clear_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core that starts again has other code than the server: it is not started for ever."""
    with engine(tiny, token_path="scheduler") as live:  # a way for tokens
        assert len(live.generate(ask(n=5))[0].tokens) == 5
        monkeypatch.setattr("evap.ring.RING_VERSION", 99)  # what the server has in memory is not what is on disk
        os.kill(live.replica.pids()[0], signal.SIGKILL)
        over = lambda: live.replica._revival is not None and live.replica._revival.done()  # noqa: E731
        eventually(over, "the engine starts for ever", 600)
        state, line = live.states[-1]
        assert state is ReplicaState.FAILED
        assert OUTDATED in line
        assert "token ring of version 99" in line
        assert live.replica.restarts == 1


def test_stop_ends_its_processes(mortal: Live) -> None:
    children = psutil.Process(mortal.replica.pids()[0]).children(recursive=True)
    core = psutil.Process(mortal.replica.pids()[0])
    keys = mortal.submit([ask(n=1900)])
    shared = mortal.replica._shared.path
    mortal.await_(mortal.replica.stop())
    assert mortal.results(keys)[0].finish is Finish.ERROR
    assert mortal.replica.state is ReplicaState.STOPPED
    _gone, alive = psutil.wait_procs([core, *children], timeout=10)
    assert not alive
    assert not shared.exists()


def test_a_stop_while_it_starts(tiny: Path) -> None:
    import asyncio

    prepare_environment()

    async def run() -> VllmReplica:
        replica = VllmReplica(config(), tiny)
        spawned = asyncio.Event()
        replica.listen(lambda batch: None, lambda state, line: spawned.set() if "process is up" in line else None)
        start = asyncio.ensure_future(replica.start())
        await spawned.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await replica.stop()
        return replica

    before = set(psutil.Process().children(recursive=True))
    replica = asyncio.run(run())
    assert replica.state is ReplicaState.STOPPED
    left = [
        p
        for p in psutil.Process().children(recursive=True)
        if p not in before and "resource_tracker" not in p.cmdline()[-1]
    ]
    psutil.wait_procs(left, timeout=15)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_arg": ("colour=red",)}, "no such option"),
        ({"max_model_len": 100_000}, "greater than the derived max_model_len"),
        ({"quantization": "fp8"}, ""),
    ],
)
def test_a_start_that_can_never_be(tiny: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message), engine(tiny, **options):
        pass


def test_a_vllm_that_moved_is_refused_before_anything_starts(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evap.engine.vllm import names

    monkeypatch.setattr(names, "CALLS", {"vllm.v1.engine.core:EngineCore.abort": ("self",)})
    with pytest.raises(StartupError, match="abort is gone"), engine(tiny):
        pass


def test_weights_that_cannot_be_read(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(StartupError, match="did not start"), engine(tmp_path):
        pass


def test_two_replicas_behind_a_router(tiny: Path) -> None:
    with engine(tiny, replicas=2, kv_cache_mb=16) as live:
        results = live.generate(*[ask([n + 2], n=50) for n in range(40)])
        assert all(len(r.tokens) == 50 for r in results)
        assert live.replica.running == [0, 0]
        first, second = live.replica.replicas
        keys = live.submit([ask([n + 2], n=1900) for n in range(10)])
        live.wait(keys, lambda r: len(r.tokens) > 2)
        os.kill(first.pids()[0], signal.SIGKILL)
        live.wait(keys, lambda r: r.finish is not Finish.NONE)
        assert sorted(r.finish.name for r in live.results(keys)) == ["ERROR"] * 5 + ["LENGTH"] * 5
        assert live.replica.state is ReplicaState.READY
        assert len(live.generate(ask(n=5))[0].tokens) == 5
        assert second.restarts == 0
