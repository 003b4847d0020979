"""Large requests through dispatch, with an intake that answers when it is told to: what is admitted when, and who is
told what. The process itself: tests/intake; with a server and clients: tests/clients/test_large_prompts.py."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from evap.config import Config, ProtocolConfig
from evap.engine.synthetic_text import SyntheticText
from evap.engines import Built
from evap.errors import ContextOverflow, Draining, InternalError, InvalidRequest, NotFound, Overloaded, RateLimited
from evap.exchange import State
from evap.intake import wire
from evap.intake.helper import Intake, Job
from evap.large import LargeRequests
from evap.messages import Prompt
from evap.protocol.api.router import dialects
from evap.protocol.limits import Shared
from evap.protocol.spool import Spool
from evap.server import Server
from tests.fakes import FakeReply, head
from tests.test_dispatch import House


class FakeIntake:
    """Keeps each step until `parsed` or `encoded` is called."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.encoding: list[Job] = []
        self.cancelled: list[Job] = []
        self.hung: list[Job] = []

    def parse(self, spool: Spool, dialect: str, done: Callable[[Any], None]) -> Job:
        self.jobs.append(Job(spool, dialect, done))
        return self.jobs[-1]

    def encode(self, job: Job, limit_tokens: int, done: Callable[[Any], None]) -> None:
        job.done = done
        self.encoding.append(job)

    def cancel(self, job: Job) -> None:
        job.spool.close()
        self.cancelled.append(job)

    def hangs(self, job: Job) -> None:
        self.cancel(job)
        self.hung.append(job)


class Large(House):
    def __init__(self, **engine: Any) -> None:
        super().__init__(**engine)
        self.intake = FakeIntake()
        self.shared = Shared()
        self.refused: list[Exception] = []
        self.looked_up: list[Exception | None] = []
        self.dispatch.large = LargeRequests(
            self.intake,  # type: ignore[arg-type]
            self.dispatch.text,
            self.dispatch.room,
            self.dispatch.upkeep,
            lambda work, back: self.pool.append((work, back)),
            lambda ticket: None,
        )
        self.dispatch.large.refuse = lambda reply, head, error: self.refused.append(error)

    def post(self, dialect: str = "completions", headers: dict[str, str] | None = None, **fields: Any) -> FakeReply:
        reply = FakeReply(self.core, next(self._streams), window=1 << 30)
        self.body = json.dumps({"prompt": "hello", **fields}).encode()
        self.shared.body_bytes += len(self.body)
        spool = Spool(self.shared, [self.body])
        self.dispatch.generate(reply, head(**(headers or {})), spool, dialects()[dialect], None, dialect)
        return reply

    def parsed(self) -> None:
        full = dialects()["completions"].parse(self.body, max_choices=8)
        self.intake.jobs[-1].done(msgspec.structs.replace(full, prompt_text=None))

    def encoded(self, text: str = "hello", echo: str | None = None) -> None:
        ids = memoryview(array("i", SyntheticText().encode(text)))
        self.intake.encoding[-1].done(Prompt.of(ids)._replace(text=echo))


@pytest.fixture
def house() -> Large:
    return Large()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("echo", [True, False])
def test_the_answer_is_that_of_a_small_request(house: Large, stream: bool, echo: bool) -> None:
    reply = house.post(stream=stream, echo=echo, max_tokens=9)
    assert house.dispatch.open == {}
    house.parsed()
    (exchange,) = house.dispatch.open
    assert exchange.state is State.OPEN
    house.encoded(echo="hello" if echo else None)
    house.loop.run()
    small = FakeReply(house.core, 99_999, window=1 << 30)
    house.dispatch.generate(small, head(), house.body, dialects()["completions"])
    house.loop.run()

    def said(reply: FakeReply) -> str:
        if stream:
            return "".join(c["text"] for e in reply.events[:-1] for c in e["choices"])
        text: str = json.loads(reply.body)["choices"][0]["text"]
        return text

    assert said(reply) == said(small) != ""
    assert house.usage(reply) == house.usage(small)
    assert house.shared.body_bytes == 0
    assert (house.refused, house.dispatch.open) == ([], {})


@pytest.mark.parametrize("error", [InvalidRequest("no"), InternalError("died")])
def test_what_is_wrong_with_the_body_belongs_to_no_exchange(house: Large, error: Exception) -> None:
    house.post()
    house.intake.jobs[0].done(error)
    assert (house.refused, house.dispatch.open) == ([error], {})


def test_a_request_is_admitted_when_it_is_parsed_and_not_tokenized_otherwise(house: Large) -> None:
    house.post(model="another")
    house.parsed()
    house.post(n=200)
    with pytest.raises(InvalidRequest):
        house.parsed()  # here the real intake says so
    house.post()
    house.dispatch.draining = True
    house.parsed()
    assert [type(e) for e in house.refused] == [NotFound, Draining]
    assert house.intake.encoding == []
    assert house.intake.cancelled == [house.intake.jobs[0], house.intake.jobs[2]]
    with pytest.raises(Draining):
        house.post()


def test_a_full_house_refuses_before_and_after_parsing() -> None:
    house = Large(max_running=1, max_queued_requests=1)
    house.post()
    house.ask()
    house.ask()
    house.parsed()
    assert [type(e) for e in house.refused] == [RateLimited]
    with pytest.raises(RateLimited):
        house.post()


def test_a_full_line_of_large_bodies_is_counted(house: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    intake = Intake(wire.Boot("", 0, 1, False), most=1)
    monkeypatch.setattr(intake, "_next", lambda: None)
    monkeypatch.setattr(house.intake, "parse", intake.parse)
    house.post()
    with pytest.raises(Overloaded) as caught:
        house.post()
    house.dispatch.note(caught.value)
    assert house.dispatch.limits["large_queue"] == 1


def test_what_is_wrong_with_the_prompt_is_answered(house: Large) -> None:
    reply = house.post()
    house.parsed()
    house.intake.encoding[0].done(ContextOverflow("too long", param="prompt"))
    house.loop.run()
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (400, "context_length_exceeded")
    assert house.dispatch.open == {}


def test_a_prompt_out_of_the_vocabulary(house: Large) -> None:
    reply = house.post()
    house.parsed()
    house.intake.encoding[0].done(Prompt.of(memoryview(array("i", [1, 2, 10**6]))))
    house.loop.run()
    assert b"out of the vocabulary" in reply.body


@pytest.mark.parametrize("parsed", [False, True])
def test_a_client_that_leaves_frees_everything(house: Large, parsed: bool) -> None:
    reply = house.post()
    if parsed:
        house.parsed()
    assert house.shared.body_bytes > 0
    house.dispatch.cancelled(reply, "client_reset")
    house.loop.run()
    assert house.intake.cancelled == house.intake.jobs
    assert (house.shared.body_bytes, house.dispatch.open, len(house.dispatch.room.line)) == (0, {}, 0)
    if parsed:  # what comes too late is thrown away
        house.encoded()
        house.loop.run()
        assert house.dispatch.steps.slots.free == 256


def test_a_deadline_counts_from_the_arrival(house: Large) -> None:
    reply = house.post(headers={"evap_deadline_ms": "5000"})
    house.loop.run(4.0)
    house.parsed()
    house.loop.run(2.0)
    assert reply.status == 504
    assert house.intake.cancelled == house.intake.jobs


@pytest.mark.parametrize("limit", ["deadline", "ttft"])
def test_time_runs_while_the_body_is_parsed(limit: str) -> None:
    house = Large(ttft_timeout_s=5.0 if limit == "ttft" else 0.0)
    house.post(headers={"evap_deadline_ms": "5000"} if limit == "deadline" else {})
    house.loop.run(4.0)
    assert house.refused == []
    house.loop.run(2.0)
    assert [getattr(e, "code", "") for e in house.refused] == [
        "ttft_timeout" if limit == "ttft" else "deadline_exceeded"
    ]
    assert house.dispatch.limits[limit] == 1
    assert house.intake.cancelled == house.intake.jobs
    assert house.intake.hung == (house.intake.jobs if limit == "ttft" else [])
    assert (house.shared.body_bytes, house.dispatch.open) == (0, {})


def test_what_was_parsed_or_has_left_is_not_late() -> None:
    house = Large(ttft_timeout_s=5.0)
    reply = house.post(headers={"evap_deadline_ms": "5000"})
    house.dispatch.cancelled(reply, "client_reset")
    house.post()
    house.intake.jobs[-1].done(InvalidRequest("no"))
    house.loop.run(9.0)
    assert [type(e) for e in house.refused] == [InvalidRequest]
    assert house.intake.hung == []


def test_a_drain_refuses_what_is_not_parsed_yet(house: Large) -> None:
    house.post()
    house.parsed()
    house.post()
    large = house.dispatch.large
    assert large is not None
    large.drain()
    assert [type(e) for e in house.refused] == [Draining]
    assert house.intake.cancelled == house.intake.jobs[1:]
    assert len(house.dispatch.open) == 1


@pytest.mark.parametrize("used", [False, True])
def test_an_operation_is_looked_up_between_the_steps(house: Large, used: bool) -> None:
    reply = house.post(max_tokens=3)
    admit = house.dispatch.accounting.admit

    def forgot(*args: Any) -> Any:
        ticket = admit(*args)
        ticket.lookup = True
        return ticket

    house.dispatch.accounting.admit = forgot  # type: ignore[method-assign,assignment]
    house.parsed()
    assert house.intake.encoding == []
    work, back = house.pool.pop()
    work()
    back(InvalidRequest("used") if used else None)
    if not used:
        house.encoded()
    house.loop.run()
    assert reply.status == (400 if used else 200)
    assert house.intake.cancelled == house.intake.jobs


def test_the_line_of_large_bodies_is_as_long_as_its_option() -> None:
    """As the server makes it; no process is started for the first."""
    house = Server(Config(protocol=ProtocolConfig(large_body_queue=3)))
    intake = house._intake(Built(engine="synthetic", model="synthetic", text=SyntheticText(), replica=house, chat=True))  # type: ignore[arg-type]
    assert intake is not None
    assert intake._most == 3
