"""An engine that another process has started: ways to it come and go, and each slot gets its final record."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evap.config import EngineConfig
from evap.engine.meter import Spec
from evap.engine.vllm import boot
from evap.engine.vllm.guest import VllmGuest
from evap.engine.vllm.rows import Step
from evap.engine.vllm.runs import Row
from evap.engine.vllm.shared import USAGE_FILE, Word
from evap.engine.vllm.table import make_memory, open_table
from evap.errors import StartupError
from evap.messages import EngineInfo, Finish, ReplicaState
from tests.engine.test_supervisor import PATIENCE_S, Listener, request

INFO = EngineInfo(engine="vllm", device="cpu", dtype="bfloat16", max_model_len=77, vocab_size=99, max_running=4)


class Seam:
    """An engine that takes everything. fails: what `open` raises; refuses: what `call` does."""

    fails: Exception | None = None
    refuses: Exception | None = None

    def __init__(self, sink: Any, address: Any) -> None:
        self.sink, self.address = sink, address
        self.added: list[str] = []
        self.calls: list[Any] = []
        self.closed = False

    async def open(self, spawned: Callable[[], None]) -> None:
        spawned()
        if Seam.fails is not None:
            raise Seam.fails

    def add(self, request_id: str) -> None:
        self.added.append(request_id)

    def abort(self, request_id: str) -> None:
        asyncio.get_running_loop().call_soon(self.sink.on_aborted, [request_id])

    async def call(self, method: str, *args: Any) -> Any:
        if Seam.refuses is not None:
            raise Seam.refuses
        self.calls.append((method, *args))
        return [True]

    async def close(self, timeout_s: float) -> None:
        self.closed = True

    def end(self, *ids: str) -> None:
        self.sink.on_step(Step(rows=[Row(request_id=id, tokens=[5], finish=Finish.STOP) for id in ids]))


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.seams: list[Seam] = []
        self.asked: list[Spec | None] = []
        self.folder = tmp_path
        (tmp_path / USAGE_FILE).write_bytes(bytes(8 * len(Word)))
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=1000))
        monkeypatch.setattr(boot, "configure", lambda *_args, **_kwargs: self.vllm_config)
        monkeypatch.setattr(boot, "guest_seam", lambda _config, sink, address: self._seam(sink, address))
        monkeypatch.setattr(boot, "mapper", lambda _config, _lora: SimpleNamespace(build=self._build, adapters={}))
        monkeypatch.setattr(Seam, "fails", None)

    def _seam(self, sink: Any, address: Any) -> Seam:
        self.seams.append(Seam(sink, address))
        return self.seams[-1]

    @staticmethod
    def _build(_request: Any, request_id: str, _arrival_s: float) -> str:
        return request_id

    def lead(self, guest: VllmGuest) -> Any:
        """Hand it a way. Returns the table of what it runs."""
        fd = make_memory()
        table = open_table(os.dup(fd))
        how: dict[str, str | int] = {"index": 2, "input": "ipc://i", "output": "ipc://o", "folder": str(self.folder)}
        guest.attach(how, INFO, [fd])
        return table

    def run(self, test: Callable[[VllmGuest, Listener], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            guest = VllmGuest(EngineConfig(engine="vllm", **options), Path("/model"), self.asked.append)
            guest.meters = [{"page": "mine"}]
            listener = Listener(guest)  # type: ignore[arg-type]
            starting = asyncio.ensure_future(guest.start())
            await wait(lambda: bool(self.asked))
            assert not starting.done()
            self.table = self.lead(guest)
            await asyncio.wait_for(starting, PATIENCE_S)
            await asyncio.wait_for(test(guest, listener), PATIENCE_S)
            await guest.stop()
            assert self.seams[-1].closed
            assert listener.states[-1] is ReplicaState.STOPPED

        asyncio.run(main())


async def wait(until: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not until():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


def test_it_asks_with_its_page_and_is_ready_with_a_way(world: World) -> None:
    async def test(guest: VllmGuest, listener: Listener) -> None:
        assert world.asked == [{"page": "mine"}]
        assert (guest.state, guest.info) == (ReplicaState.READY, INFO)
        assert world.vllm_config.model_config.max_model_len == 77  # what the engine has made of it
        assert world.seams[0].address == (2, "ipc://i", "ipc://o")
        [(method, name, _, (settings,), _)] = world.seams[0].calls
        assert (method, name, settings["client"], settings["meter"]) == (
            "collective_rpc",
            "evap_install",
            2,
            {"page": "mine"},
        )
        guest.submit(3, 1, request(1, 5))
        assert world.table.ids() == world.seams[0].added
        world.seams[0].end(*world.seams[0].added)
        assert (await listener.end(3, 1))[0] is Finish.STOP
        assert world.table.ids() == []
        assert settings["nonce"] == world.table.nonce

    world.run(test)


def test_the_engine_dies_and_comes_back(world: World) -> None:
    async def test(guest: VllmGuest, listener: Listener) -> None:
        guest.submit(3, 1, request(1, 5))
        guest.engine_is(ReplicaState.FAILED, "why")
        assert (await listener.end(3, 1))[0] is Finish.ERROR
        assert guest.state is ReplicaState.FAILED
        assert len(world.asked) == 2
        guest.submit(3, 2, request(1, 5))
        assert (await listener.end(3, 2))[0] is Finish.ERROR
        guest.engine_is(ReplicaState.STARTING, "loading")
        world.lead(guest)
        await wait(lambda: guest.state is ReplicaState.READY)
        guest.submit(3, 3, request(1, 5))
        world.seams[0].end(*world.seams[0].added)  # the dead one's last words are about nobody
        world.seams[1].end(*world.seams[1].added)
        assert (await listener.end(3, 3))[0] is Finish.STOP
        assert world.seams[0].closed

    world.run(test)


def test_a_way_that_leads_nowhere_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(guest: VllmGuest, listener: Listener) -> None:
        world.seams[0].sink.on_death("the engine takes no requests")
        assert len(world.asked) == 2
        monkeypatch.setattr(Seam, "fails", TimeoutError("no answer"))
        world.lead(guest)
        await wait(lambda: len(world.asked) == 3)
        assert guest.state is ReplicaState.FAILED
        monkeypatch.setattr(Seam, "fails", None)
        world.lead(guest)
        world.lead(guest)  # two at once: the second holds
        await wait(lambda: guest.state is ReplicaState.READY)
        guest.submit(0, 0, request(1, 5))
        assert len(world.seams[-1].added) == 1

    world.run(test)


def test_an_engine_that_ends_while_the_meter_is_installed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(guest: VllmGuest, listener: Listener) -> None:
        monkeypatch.setattr(Seam, "refuses", RuntimeError("the engine takes no requests"))
        world.lead(guest)
        await wait(lambda: len(world.asked) == 2)
        assert guest.state is ReplicaState.FAILED
        monkeypatch.setattr(Seam, "refuses", None)
        world.lead(guest)
        await wait(lambda: guest.state is ReplicaState.READY)

    world.run(test)


def test_with_a_ring_it_makes_one_for_each_way(world: World) -> None:
    async def test(guest: VllmGuest, listener: Listener) -> None:
        first = world.table.nonce
        assert {path.name for path in (world.folder / first).iterdir()} == {"ring", "bell"}
        second = world.lead(guest)
        await wait(lambda: guest.state is ReplicaState.READY and second.nonce != "")
        files = world.folder / second.nonce
        await wait(files.exists)
        assert second.nonce != first

    world.run(test, token_path="scheduler")


def test_a_start_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def configure(*_args: Any, **_kwargs: Any) -> Any:
        raise StartupError("vLLM is not installed")

    monkeypatch.setattr(boot, "configure", configure)

    async def main() -> None:
        guest = VllmGuest(EngineConfig(engine="vllm"), Path("/model"), lambda _meter: None)
        with pytest.raises(StartupError, match="not installed"):
            await guest.start()

    before = dict(os.environ)
    asyncio.run(main())
    assert dict(os.environ) == before, "what vLLM was told for its import is not told to what is started later"
