"""A guest's sockets, with a stand-in for the engine's ends: what a dead guest was sent is not its successor's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from evap.engine.vllm import ids
from evap.engine.vllm.addresses import addresses
from evap.engine.vllm.rows import Step
from tests.engine.vllm.live import NEEDS_VLLM
from tests.support import TIME_FACTOR

pytestmark = NEEDS_VLLM
PATIENCE_S = 30.0 * TIME_FACTOR


class Sink:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.aborted: list[str] = []
        self.deaths: list[str] = []

    def on_step(self, step: Step) -> None:
        self.steps.append(step)

    def on_aborted(self, ids: Sequence[str]) -> None:
        self.aborted += ids

    def on_death(self, reason: str) -> None:
        self.deaths.append(reason)


class Engine:
    """The ends that vLLM's engine core has: it connects, and goes on trying."""

    def __init__(self, address: Any) -> None:
        import zmq.asyncio

        from evap.engine.vllm import names

        self._names = names
        self.context = zmq.asyncio.Context()
        self.input, self.output = self.context.socket(zmq.DEALER), self.context.socket(zmq.PUSH)
        self.input.setsockopt(zmq.IDENTITY, b"\0\0")
        self.input.connect(address.input)
        self.output.connect(address.output)
        self._encode = names.MsgpackEncoder().encode

    async def tokens(self, *request_ids: str) -> None:
        outputs = [self._names.EngineCoreOutput(id, [7]) for id in request_ids]
        await self.output.send_multipart(self._encode(self._names.EngineCoreOutputs(outputs=outputs)))

    async def heard(self) -> tuple[bytes, Any]:
        kind, data = await asyncio.wait_for(self.input.recv_multipart(), PATIENCE_S)
        return kind, msgspec.msgpack.decode(data)

    async def answer(self) -> tuple[int, str]:
        """Hear a call and answer it. Returns whose it was, and what."""
        return await self.reply(await self.heard())

    async def reply(self, call: tuple[bytes, Any]) -> tuple[int, str]:
        _, (client, call_id, method, _args) = call
        from vllm.v1.engine import UtilityOutput
        from vllm.v1.serial_utils import UtilityResult

        output = UtilityOutput(call_id, result=UtilityResult(False))
        await self.output.send_multipart(self._encode(self._names.EngineCoreOutputs(utility_output=output)))
        return client, method

    def close(self) -> None:
        self.context.destroy(linger=0)


def run(tmp_path: Path, test: Callable[[Any, Sink, Callable[[], Any]], Awaitable[None]]) -> None:
    """test: called with an address, a sink, and what makes a seam there."""
    from evap.engine.vllm.fronts import GuestSeam

    async def main() -> None:
        address, sink = addresses(tmp_path, 3)[2], Sink()
        await asyncio.wait_for(test(address, sink, lambda: GuestSeam(SimpleNamespace(), sink, address)), PATIENCE_S)

    asyncio.run(main())


async def until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def nothing() -> None:
    """Called once the engine's processes exist."""


def test_what_was_meant_for_a_dead_guest_is_not_heard(tmp_path: Path) -> None:
    old, new = ids.make("00000a", 1, 5, 0), ids.make("00000b", 1, 5, 0)  # one slot, one generation, two processes

    async def test(address: Any, sink: Sink, make: Callable[[], Any]) -> None:
        engine = Engine(address)
        await engine.tokens(old)  # nobody is there: they wait in the engine's socket
        seam = make()
        opening = asyncio.ensure_future(seam.open(nothing))
        assert await engine.answer() == (2, "is_scheduler_paused")
        await opening
        await engine.tokens(new)
        await until(lambda: bool(sink.steps))
        assert [step.slots.tolist() for step in sink.steps] == [[5]]
        await seam.close(0)
        engine.close()

    run(tmp_path, test)


def test_an_answer_to_a_dead_guest_is_none_to_its_successor(tmp_path: Path) -> None:
    async def test(address: Any, sink: Sink, make: Callable[[], Any]) -> None:
        engine = Engine(address)
        former = make()
        opening = asyncio.ensure_future(former.open(nothing))
        asked = await engine.heard()
        opening.cancel()  # it dies before it is answered
        with pytest.raises(asyncio.CancelledError):
            await opening
        await former.close(0)
        await engine.reply(asked)
        seam = make()
        opening = asyncio.ensure_future(seam.open(nothing))
        asked = await engine.heard()
        await asyncio.sleep(0.1)
        assert not opening.done()
        await engine.reply(asked)
        await opening
        await seam.close(0)
        engine.close()

    run(tmp_path, test)


def test_requests_and_aborts_carry_its_number_and_come_in_order(tmp_path: Path) -> None:
    async def test(address: Any, sink: Sink, make: Callable[[], Any]) -> None:
        from evap.engine.vllm import names

        engine, seam = Engine(address), make()
        opening = asyncio.ensure_future(seam.open(nothing))
        await engine.answer()
        await opening
        params = names.SamplingParams(max_tokens=3)
        fields = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
        seam.add(
            names.EngineCoreRequest(
                request_id="one", prompt_token_ids=[1], sampling_params=params, arrival_time=0.0, **fields
            )
        )
        kind, request = await engine.heard()
        decoded = msgspec.convert(request, names.EngineCoreRequest, strict=False)
        assert (kind, decoded.request_id, decoded.client_index) == (b"\0", "one", 2)
        seam.abort("one")
        assert await engine.heard() == (b"\1", ["one"])
        assert await engine.answer() == (2, "is_scheduler_paused")
        await until(lambda: sink.aborted == ["one"])
        await seam.close(0)
        engine.close()

    run(tmp_path, test)


def test_an_engine_that_is_gone_or_says_that_it_died_ends_it(tmp_path: Path) -> None:
    async def test(address: Any, sink: Sink, make: Callable[[], Any]) -> None:
        from evap.engine.vllm import names

        for end in ("says so", "is gone"):
            sink.deaths.clear()
            engine, seam = Engine(address), make()
            opening = asyncio.ensure_future(seam.open(nothing))
            await engine.answer()
            await opening
            if end == "says so":
                await engine.output.send(names.EngineCoreProc.ENGINE_CORE_DEAD)
            else:
                engine.close()
                while not sink.deaths:
                    seam.abort("any")
                    await asyncio.sleep(0.01)
            await until(lambda: len(sink.deaths) == 1)
            await seam.close(0)
            engine.close()

    run(tmp_path, test)


def test_an_engine_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evap.engine.vllm import fronts

    monkeypatch.setattr(fronts, "HELLO_S", 0.2)

    async def test(address: Any, sink: Sink, make: Callable[[], Any]) -> None:
        for there in (False, True):
            engine = Engine(address) if there else None
            seam = make()
            with pytest.raises(TimeoutError):
                await seam.open(nothing)
            await seam.close(0)
            if engine is not None:
                engine.close()
        assert sink.deaths == []

    run(tmp_path, test)
