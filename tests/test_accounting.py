"""Exchanges and their accounts: one record each, whatever way they end, and the same counts everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from evap.errors import StartupError
from evap.metering import opened
from tests.fakes import FakeReply
from tests.metered import WALL_S, Metered, error_of

Make = Callable[..., Metered]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def one(**settings: Any) -> Metered:
            it = Metered(tmp_path, **settings)
            stack.callback(it.accounting.close)
            return it

        yield one


# One record each


@pytest.mark.parametrize("stream", [True, False])
def test_a_complete_answer(make: Make, stream: bool) -> None:
    it = make()
    reply = it.ask(stream=stream, max_tokens=9, ignore_eos=True, n=2)
    it.loop.run()
    (record,) = it.records()
    id = reply.events[0]["id"] if stream else json.loads(reply.body)["id"]
    assert (record.id, record.key, record.model, record.end) == (id, "", "synthetic", "length")
    assert (record.computed, record.emitted, record.delivered, record.billable) == (18, 18, 18, 18)
    assert (record.choices, record.status, record.steps) == (2, 200, 9)
    assert WALL_S * 10**6 < record.opened_us <= record.first_us < record.last_us <= record.settled_us
    assert it.get("/v1/usage/" + id)["emitted"] == 18


def test_a_client_that_reads_six_chunks_and_leaves(make: Make) -> None:
    it = make()
    reply = it.ask(stream=True, max_tokens=500, ignore_eos=True)
    while len(reply.events) < 7:  # the role, and six of text
        it.loop.run(0.001, calls=3)
    it.dispatch.cancelled(reply, "client_gone")
    it.loop.run()
    (record,) = it.records()
    sent = sum(1 for e in reply.events if e["choices"][0]["delta"].get("content"))
    assert record.end == "client_abort"
    assert record.computed >= record.emitted >= record.delivered == sent == record.billable >= 6
    assert it.get("/v1/usage/" + record.id)["end"] == "client_abort"


def test_a_stop_string_bills_no_token_past_it(make: Make) -> None:
    it = make()
    whole = it.ask(max_tokens=40, ignore_eos=True)
    it.loop.run()
    text = json.loads(whole.body)["choices"][0]["message"]["content"]
    it.ask(stream=True, max_tokens=40, ignore_eos=True, stop=[text[12:15]])
    it.loop.run()
    record = it.records()[1]
    assert record.end == "stop"
    assert 0 < record.billable == record.delivered == record.emitted <= record.computed < 40


def test_an_engine_that_fails(make: Make) -> None:
    it = make(meter={"billable": "emitted"})
    streamed = it.ask(stream=True, max_tokens=100, ignore_eos=True)
    whole = it.ask(max_tokens=100, ignore_eos=True)
    it.loop.run(0.02)
    it.replica.fail("broken")
    it.loop.run()
    assert whole.status == 500
    records = {r.id: r for r in it.records()}
    assert {r.end for r in records.values()} == {"engine_failed"}
    streamed_record = records[streamed.events[0]["id"]]
    assert streamed_record.computed > 0
    assert streamed_record.billable == streamed_record.delivered > 0
    assert sum(r.billable for r in records.values()) == streamed_record.billable, "the whole answer was never given"


def test_one_that_never_ran_costs_nothing(make: Make) -> None:
    it = make(max_model_len=64)
    reply = it.ask(max_tokens=1000)
    assert reply.status == 400
    it.loop.run()
    (record,) = it.records()
    assert (record.end, record.prompt, record.computed, record.billable) == ("context_length_exceeded", 0, 0, 0)


def test_running_ones_are_visible_at_once(make: Make) -> None:
    it = make()
    reply = it.ask(stream=True, max_tokens=100, ignore_eos=True)
    it.loop.run(0.02)
    id = reply.events[0]["id"]
    seen = it.get("/v1/usage/" + id)
    assert (seen["state"], seen["end"]) == ("running", None)
    assert 0 < seen["delivered"] == seen["computed"] < 100
    it.loop.run()
    assert it.get("/v1/usage/" + id)["state"] == "settled"


def test_without_a_folder_there_is_no_ledger_but_recent_usage(make: Make) -> None:
    it = make(ledger=False)
    reply = it.ask(max_tokens=3)
    it.loop.run()
    assert it.get("/v1/usage/" + json.loads(reply.body)["id"])["emitted"] == 3
    assert it.send("GET", "/v1/usage").status == 404


# Trailers


def test_trailers_for_those_who_take_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    end = FakeReply.end

    def kept(self: FakeReply, trailers: Any = ()) -> None:
        given.append(dict(trailers))
        end(self)

    monkeypatch.setattr(FakeReply, "end", kept)
    it = make()
    it.ask(stream=True, max_tokens=7, ignore_eos=True, headers={"te": "trailers"})
    it.loop.run()
    it.ask(stream=True, max_tokens=7)
    it.loop.run()
    record = it.records()[0]
    with_usage = next(t for t in given if t)
    assert with_usage == {
        b"evap-usage-id": record.id.encode(), b"evap-usage-prompt": b"%d" % record.prompt,
        b"evap-usage-cached": b"0", b"evap-usage-computed": b"7", b"evap-usage-emitted": b"7",
        b"evap-usage-delivered": b"7", b"evap-usage-end": b"length",
    }  # fmt: skip
    assert sum(map(bool, given)) == 1


# Death


def test_a_killed_server_settles_at_the_next_start(make: Make, tmp_path: Path) -> None:
    it = make()
    replies = [it.ask(stream=True, max_tokens=100, ignore_eos=True, n=2 - i % 2) for i in range(4)]
    whole = it.ask(max_tokens=100, ignore_eos=True, headers={"idempotency_key": "w"})
    stopping = it.ask(stream=True, max_tokens=100, ignore_eos=True, stop=["never to be seen"])
    done = it.ask(stream=True, max_tokens=5, ignore_eos=True)
    it.loop.run(0.03)
    assert done.ended
    it.dispatch.accounting.tick(list(it.dispatch.open))
    expected = {}
    for exchange in it.dispatch.open:
        it.dispatch.steps.counts(exchange)
        expected[exchange.renderer.id] = exchange.usage()
    assert len(expected) == 6
    it.die()
    again = Metered(tmp_path)
    records = {r.id: r for r in again.records()}
    assert len(records) == 7
    for id, usage in expected.items():
        record = records[id]
        assert record.end == "interrupted"
        assert (record.computed, record.emitted, record.delivered) == (usage.computed, usage.emitted, usage.delivered)
        assert record.prompt == usage.prompt > 0
    assert sum(r.delivered for r in records.values() if r.end == "interrupted") > 0
    for reply in (*replies, stopping):
        contents = [c["delta"].get("content") for e in reply.events for c in e["choices"]]
        assert records[reply.events[0]["id"]].delivered == sum(map(bool, contents))
    assert again.ask(headers={"idempotency_key": "w"}).alive, "nothing of it was delivered: it may be tried again"
    assert not whole.started
    again.loop.run()
    again.accounting.close()
    third = Metered(tmp_path)
    assert len(third.records()) == 8, "settled once"
    assert sum(r.end == "interrupted" for r in third.records()) == 6
    third.accounting.close()


def test_a_slow_reader_of_a_killed_server(make: Make, tmp_path: Path) -> None:
    """Its answer is complete and all slots are free, but it has not read it."""
    it = make()
    reply = it.ask(stream=True, max_tokens=8, ignore_eos=True, stop=["never to be seen"])
    reply.stuck = True
    it.loop.run()
    (exchange,) = it.dispatch.open
    assert not it.settled
    it.ask(max_tokens=3)  # another one takes its slot
    it.loop.run(0.001)
    it.die()
    (survivor, _) = sorted(
        opened.recover(it.folder / "open"), key=lambda s: exchange.renderer.id.encode() not in s.note
    )
    assert (survivor.computed, survivor.emitted, survivor.delivered) == (8, 8, exchange.usage().delivered)


# Trouble


def test_two_servers_cannot_share_a_folder(make: Make, tmp_path: Path) -> None:
    make()
    with pytest.raises(StartupError, match="another server"):
        Metered(tmp_path)


def test_a_sink_needs_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--usage-sink"):
        Metered(tmp_path, ledger=False, meter={"usage_sink": "postgresql://x"})


def test_a_ledger_that_cannot_be_written_shows(make: Make) -> None:
    from evap.metering.recorder import State

    it = make()
    assert it.accounting.recorder is not None
    it.accounting.recorder.state, it.accounting.recorder.detail = State.SPOOLING, "disk is full"
    ready = it.get("/ready")
    assert (ready["status"], ready["trouble"]) == ("degraded", "ledger spooling: disk is full")
    assert it.accounting.gauges()["ledger_ok"][1]() == 0
    assert it.ask(max_tokens=1).alive
    it.accounting.recorder.accepting = False
    refused = it.ask(max_tokens=1)
    assert refused.status == 503
    assert error_of(refused)["code"] == "ledger_unavailable"
    it.accounting.recorder.state = State.OK
