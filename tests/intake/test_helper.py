"""The real process behind its client: the same requests, ids and errors as in this one; its deaths; its ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evap.engine.synthetic_text import SyntheticText
from evap.errors import EvapError, InternalError, Overloaded
from evap.intake import helper, wire
from evap.intake.helper import Intake, Job
from evap.messages import ParsedRequest, Prompt
from evap.protocol.api.router import dialects
from evap.protocol.limits import Shared
from evap.protocol.spool import Spool
from tests.support import TIME_FACTOR

BOOT = wire.Boot("", 8, 4, False)
SOON_S = 20 * TIME_FACTOR
LONG = "The quick brown fox. " * 3000

CHAT = {"messages": [{"role": "system", "content": "Be \u20ac."}, {"role": "user", "content": LONG}], "max_tokens": 7}
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat", CHAT),
    "chat with all": ("chat", {**CHAT, "stop": ["a", "b"], "n": 2, "stream": True, "temperature": 0.5, "user": "me"}),
    "text": ("completions", {"prompt": LONG, "max_tokens": 3}),
    "echo": ("completions", {"prompt": LONG + "\u20ac", "echo": True}),
    "ids": ("completions", {"prompt": list(range(200)) * 50}),
    "few ids": ("completions", {"prompt": [1, 2, 3]}),
}
BAD: dict[str, tuple[str, bytes]] = {
    "no JSON": ("chat", b'{"messages": ['),
    "no messages": ("chat", b"{}"),
    "role": ("chat", json.dumps({"messages": [{"role": "x" * 500, "content": LONG}]}).encode()),
    "n": ("completions", json.dumps({"prompt": LONG, "n": 5}).encode()),
    "not UTF-8": ("completions", b'{"prompt":"\xff' + LONG.encode() + b'"}'),
}


class Home:
    """An Intake and what its jobs came to."""

    def __init__(self, most: int = 64, module: str = "evap.intake.worker") -> None:
        self.shared = Shared()
        self.intake = Intake(BOOT, most, module=module)

    def spool(self, body: bytes) -> Spool:
        self.shared.body_bytes += len(body)
        return Spool(self.shared, [body])

    def start(self, dialect: str, body: bytes) -> tuple[Job, asyncio.Future[Any]]:
        """Parsing; the future has the request or the exception."""
        parsed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        return self.intake.parse(self.spool(body), dialect, parsed.set_result), parsed

    async def whole(self, dialect: str, body: bytes, limit: int = 0) -> tuple[ParsedRequest, Prompt]:
        """Both steps. Raises what the job came to."""
        job, parsed = self.start(dialect, body)
        request = await asyncio.wait_for(parsed, SOON_S)
        if isinstance(request, Exception):
            raise request
        encoded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.intake.encode(job, limit, encoded.set_result)
        prompt = await asyncio.wait_for(encoded, SOON_S)
        if isinstance(prompt, Exception):
            raise prompt
        return request, prompt


@asynccontextmanager
async def home(**options: Any) -> AsyncIterator[Home]:
    it = Home(**options)
    try:
        yield it
    finally:
        it.intake.close()
    assert it.shared.body_bytes == 0


def here(dialect: str, body: bytes) -> tuple[ParsedRequest, list[int]]:
    """The same in this process."""
    request, text = dialects()[dialect].parse(body, max_choices=BOOT.max_choices), SyntheticText()
    if request.messages is not None:
        return request, text.chat_ids(request.messages, dict(request.template_args))
    if request.prompt_ids is not None:
        return request, list(request.prompt_ids)
    return request, text.encode(request.prompt_text or "")


def unwanted(result: object) -> None:
    raise AssertionError(result)


def test_the_same_requests_and_ids() -> None:
    async def run() -> None:
        async with home() as it:
            for name, (dialect, body) in GOOD.items():
                data = json.dumps(body).encode()
                request, prompt = await it.whole(dialect, data)
                full, ids = here(dialect, data)
                bare = msgspec.structs.replace(full, messages=None, prompt_text=None, prompt_ids=None, template_args={})
                assert request == bare, name
                assert (list(prompt.ids), prompt.low, prompt.high) == (ids, min(ids), max(ids)), name
                assert isinstance(prompt.ids, list) == (len(ids) < helper.LIST_IDS), name
                assert prompt.text == (full.prompt_text if full.echo else None), name

    asyncio.run(run())


def test_the_same_errors() -> None:
    async def run() -> None:
        async with home() as it:
            for name, (dialect, data) in BAD.items():
                with pytest.raises(EvapError) as there:
                    await it.whole(dialect, data)
                with pytest.raises(EvapError) as own:
                    here(dialect, data)
                assert type(there.value) is type(own.value), name
                for part in ("message", "param", "code"):
                    assert getattr(there.value, part) == getattr(own.value, part), name
            assert it.intake.jobs == 0

    asyncio.run(run())


def test_a_cancel_frees_at_once_and_the_next_job_goes_on() -> None:
    """At any moment of a job: queued, being parsed, parsed, being tokenized (which would take many seconds)."""

    async def run() -> None:
        async with home() as it:
            large = json.dumps({"prompt": "word " * (3 << 20)}).encode()
            await it.whole("completions", b'{"prompt":"warm"}')
            tokenizing, parsed = it.start("completions", large)
            await asyncio.wait_for(parsed, SOON_S)
            it.intake.encode(tokenizing, 0, unwanted)
            _, waiting = it.start("completions", large), it.start("completions", large)
            await asyncio.sleep(0.1)
            assert it.shared.body_bytes == 2 * len(large)  # what is parsed is no longer a body
            it.intake.cancel(waiting[0])
            it.intake.cancel(tokenizing)
            assert it.shared.body_bytes == len(large)
            it.intake.cancel(tokenizing)  # again: nothing happens
            parsing = it.intake._current
            assert parsing is not None
            it.intake.cancel(parsing)
            assert it.shared.body_bytes == 0
            request, _ = await it.whole("chat", json.dumps(CHAT).encode())
            assert request.max_tokens == 7

    asyncio.run(run())


def test_a_process_that_dies_fails_its_job_only() -> None:
    async def run() -> None:
        async with home() as it:
            await it.whole("completions", b'{"prompt":"warm"}')
            first = it.intake.pid
            assert first is not None
            job, parsed = it.start("completions", json.dumps({"prompt": "word " * (1 << 20)}).encode())
            _, behind = it.start("completions", b'{"prompt":"next","max_tokens":9}')
            os.kill(first, signal.SIGKILL)
            assert isinstance(await asyncio.wait_for(parsed, SOON_S), InternalError)
            assert (await asyncio.wait_for(behind, SOON_S)).max_tokens == 9
            assert it.intake.pid != first
            late: list[Any] = []
            it.intake.encode(job, 0, late.append)  # a job that is over
            assert isinstance(late[0], InternalError)

    asyncio.run(run())


def test_a_process_that_hangs_is_ended_and_the_next_job_goes_on() -> None:
    async def run() -> None:
        async with home() as it:
            await it.whole("completions", b'{"prompt":"warm"}')
            assert it.intake.pid is not None
            os.kill(it.intake.pid, signal.SIGSTOP)
            data = b'{"prompt":"next","max_tokens":9}'
            job = it.intake.parse(it.spool(data), "completions", unwanted)
            waits = it.intake.parse(it.spool(data), "completions", unwanted)
            _, behind = it.start("completions", data)
            it.intake.hangs(waits)  # not its fault, and not that of the process
            assert it.intake.jobs == 2
            it.intake.hangs(job)
            assert (await asyncio.wait_for(behind, SOON_S)).max_tokens == 9

    asyncio.run(run())


def test_a_process_that_reads_nothing_any_more_is_ended_not_fed() -> None:
    async def run() -> None:
        async with home() as it:
            await it.whole("completions", b'{"prompt":"warm"}')
            assert it.intake.pid is not None
            first = it.intake.pid
            os.kill(first, signal.SIGSTOP)
            for _ in range(3000):  # more packets than a socket takes
                it.intake.cancel(it.intake.parse(it.spool(b"{}"), "completions", unwanted))
            _, failed = it.start("completions", b"{}")
            assert isinstance(await asyncio.wait_for(failed, SOON_S), InternalError)
            assert it.intake.pid != first
            assert (await it.whole("completions", b'{"prompt":"x"}'))[1].ids == [120]

    asyncio.run(run())


def test_a_process_that_cannot_start_fails_its_jobs() -> None:
    async def run() -> None:
        async with home(module="evap.intake.no_such_module") as it:
            for _ in range(2):
                with pytest.raises(InternalError):
                    await it.whole("chat", b"{}")

    asyncio.run(run())


def test_a_system_that_starts_no_process_fails_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    async def run() -> None:
        async with home() as it:
            with monkeypatch.context() as patch:
                patch.setattr(subprocess, "Popen", refuse)
                first, parsed = it.start("chat", b"{}")
                _, second = it.start("chat", b"{}")
                it.intake.cancel(first)
                assert isinstance(await asyncio.wait_for(second, SOON_S), InternalError)
            assert not parsed.done()
            assert (await it.whole("completions", b'{"prompt":"x"}'))[1].ids == [120]

    asyncio.run(run())


def test_what_may_wait_is_bounded() -> None:
    async def run() -> None:
        async with home(most=2) as it:
            jobs = [it.start("chat", b"{}")[0] for _ in range(3)]
            refused = it.spool(b"{}")
            with pytest.raises(Overloaded):
                it.intake.parse(refused, "chat", unwanted)
            refused.close()
            assert it.intake.jobs == 3
            for job in jobs:
                it.intake.cancel(job)
            assert it.intake.jobs == 0

    asyncio.run(run())


def test_nothing_runs_before_it_is_needed_and_nothing_after_the_end() -> None:
    async def run() -> int | None:
        async with home() as it:
            assert it.intake.pid is None
            await it.whole("completions", b'{"prompt":"x"}')
            pid = it.intake.pid
            assert pid is not None
            priorities = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}
            assert priorities == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + helper.NICENESS)}
            return pid

    pid = asyncio.run(run())
    assert pid
    assert not Path(f"/proc/{pid}").exists()
