"""Keys, limits, budgets and operations, as a client meets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from evap.errors import Unauthenticated
from evap.messages import GenerateRequest
from evap.metering import keys
from evap.metering.accounts import Key
from evap.metering.operations import Operations
from evap.protocol.api.router import PREFIXES, ROUTES
from evap.protocol.events import RequestReady
from tests.fakes import FakeReply, head
from tests.metered import Metered, error_of

Make = Callable[..., Metered]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def one(**settings: Any) -> Metered:
            it = Metered(tmp_path, **settings)
            stack.callback(it.accounting.close)
            return it

        yield one


def finish_of(reply: FakeReply) -> Any:
    return next(c for e in reply.events if e != "[DONE]" for c in e["choices"] if c["finish_reason"])


# Keys


def test_every_route_but_health_asks_for_a_key(make: Make) -> None:
    it = make(key_settings={"alice": {}})
    for path, route in [*ROUTES.items(), *((prefix + "x", route) for prefix, route in PREFIXES.items())]:
        body = {"prompt": "x"} if route.method == "POST" else None
        reply = it.send(route.method, path, body)
        assert (reply.status == 401) == (not route.public), path
        if reply.status == 401:
            assert reply.headers[b"www-authenticate"] == b"Bearer"
            assert error_of(reply)["type"] == "authentication_error"
            assert it.send(route.method, path, body, key="sk-evap-wrong").status == 401
            assert it.send(route.method, path, body, key="alice").status != 401
    it.loop.run()
    assert it.records()[0].key == "alice"


def test_only_the_probes_are_public() -> None:
    """A route without a key is a decision, made here: vLLM's --api-key left several open."""
    assert {path for path, route in ROUTES.items() if route.public} == {"/health", "/ready"}
    assert not any(route.public for route in PREFIXES.values())


def test_a_head_is_looked_at_once_and_again_when_the_keys_have_changed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its head, with its body, and with the next request of the same head. What was revoked in between counts."""
    it = make(key_settings={"alice": {}, "bob": {}})
    checked: list[bytes] = []
    check = keys.KeyRing.check

    def counting(ring: keys.KeyRing, secret: bytes) -> Key | None:
        checked.append(secret)
        return check(ring, secret)

    monkeypatch.setattr(keys.KeyRing, "check", counting)
    mine = head(authorization=f"Bearer {it.secrets['alice']}")
    assert it.app.admit(mine) is None
    reply = FakeReply(it.core, 1)
    it.app.on_event(RequestReady(reply, mine, b'{"messages":[{"role":"user","content":"x"}]}'))
    it.loop.run()
    assert (reply.status, len(checked)) == (200, 1)
    assert [record.key for record in it.records()] == ["alice"]
    keys.revoke(it.key_file, "bob")
    it.accounting.reload()
    assert it.app.admit(mine) is None
    keys.revoke(it.key_file, "alice")
    it.accounting.reload()
    late = FakeReply(it.core, 3)
    it.app.on_event(RequestReady(late, mine, b"{}"))
    assert (late.status, len(checked)) == (401, 3)
    assert isinstance(it.app.admit(mine), Unauthenticated)


def test_a_model_that_a_key_may_not_use(make: Make) -> None:
    it = make(key_settings={"alice": {"models": ["other"]}})
    reply = it.ask(key="alice")
    assert reply.status == 403
    assert error_of(reply)["code"] == "model_denied"


def test_an_adapter_is_a_model_of_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it = make(key_settings={"alice": {"models": ["lora"]}})
    monkeypatch.setattr(it.replica, "adapters", ("lora",), raising=False)
    assert it.ask(key="alice", max_tokens=3).status == 403
    it.ask(key="alice", max_tokens=3, model="lora")
    it.loop.run()
    assert [r.model for r in it.records()] == ["lora"]


def test_limits_are_said_in_headers(make: Make) -> None:
    it = make(key_settings={"alice": {"requests_per_minute": 2, "tokens_per_minute": 100}})
    first = it.ask(key="alice", max_tokens=10)
    it.loop.run(1.0)
    assert first.status == 200
    assert first.headers[b"x-ratelimit-limit-requests"] == b"2"
    assert first.headers[b"x-ratelimit-remaining-requests"] == b"1"
    assert int(first.headers[b"x-ratelimit-remaining-tokens"]) < 90
    big = it.ask(key="alice", max_tokens=90)
    assert big.status == 429
    assert error_of(big)["code"] == "rate_limit_exceeded"
    assert 0 < int(big.headers[b"retry-after"]) <= 60
    assert big.headers[b"x-ratelimit-limit-tokens"] == b"100"
    assert it.ask(key="alice", max_tokens=1).status == 429, "both requests of this minute are used"
    assert it.dispatch.limits["key_rate"] == 2


def test_requests_at_once(make: Make) -> None:
    it = make(key_settings={"alice": {"max_streams": 1}})
    it.ask(key="alice", max_tokens=10)
    assert it.ask(key="alice", max_tokens=10).status == 429
    assert it.dispatch.limits["key_streams"] == 1
    it.loop.run()
    assert it.ask(key="alice", max_tokens=10, stream=True).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_budget_that_runs_out_ends_the_stream(make: Make, stream: bool) -> None:
    it = make(key_settings={"alice": {"tokens_per_day": 50}})
    reply = it.ask(key="alice", stream=stream, ignore_eos=True, max_tokens=5000)
    it.loop.run()
    choice = finish_of(reply) if stream else json.loads(reply.body)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "evap:budget")
    (record,) = it.records()
    assert record.end == "budget"
    assert record.prompt + record.computed == 50
    refused = it.ask(key="alice", max_tokens=1)
    assert refused.status == 429
    assert error_of(refused)["code"] == error_of(refused)["type"] == "insufficient_quota"
    assert b"retry-after" in refused.headers
    assert it.dispatch.limits["key_budget"] == 1


def test_fifty_at_once_on_a_hundred_tokens(make: Make) -> None:
    it = make(key_settings={"alice": {"tokens_per_day": 100}})
    replies = [it.ask(key="alice", stream=True, max_tokens=30, ignore_eos=True) for _ in range(50)]
    it.loop.run()
    answered = [r for r in replies if r.status == 200]
    assert answered
    assert {r.status for r in replies} == {200, 429}
    used = sum(r.prompt + r.billable for r in it.records() if r.computed)
    assert used <= 100


def test_budgets_survive_a_restart(make: Make, tmp_path: Path) -> None:
    it = make(key_settings={"alice": {"tokens_per_day": 50}})
    it.ask(key="alice", ignore_eos=True, max_tokens=20)
    it.loop.run()
    it.accounting.close()
    again = Metered(tmp_path, meter={"api_keys": str(it.key_file)})
    again.secrets = it.secrets
    again.ask(key="alice", ignore_eos=True, max_tokens=500)
    again.loop.run()
    assert sum(r.prompt + r.billable for r in again.records()) == 50
    again.accounting.close()


def test_keys_are_read_again(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="evap.accounting")
    it = make(key_settings={"alice": {}, "bob": {"tokens_per_day": 50}})
    it.ask(key="bob", max_tokens=10, ignore_eos=True)
    it.loop.run()
    keys.revoke(it.key_file, "alice")
    it.secrets["carol"] = keys.create(it.key_file, "carol", {})
    assert it.send("GET", "/v1/models", key="alice").status == 200
    it.accounting.reload()
    assert "2 keys read" in caplog.text, "those of the file"
    assert it.send("GET", "/v1/models", key="alice").status == 401
    assert it.send("GET", "/v1/models", key="carol").status == 200
    account = it.accounting._accounts["bob"]
    assert account.day.used > 0, "what was used stays used"
    it.key_file.write_text("nonsense [")
    it.accounting.reload()
    assert it.send("GET", "/v1/models", key="carol").status == 200
    assert "keys stay as they are" in caplog.text


def test_priority_reaches_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it = make(key_settings={"vip": {"priority": -3}})
    seen: list[int] = []
    monkeypatch.setattr(it.replica, "submit", lambda slot, generation, request: seen.append(request.priority))
    it.ask(key="vip")
    assert seen == [-24]


def test_keys_take_turns_whatever_their_address(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it = make(key_settings={"hog": {}, "other": {}, "vip": {"priority": -1}}, max_running=1)
    seen: list[str] = []
    submit = it.replica.submit

    def spy(slot: int, generation: int, request: GenerateRequest) -> None:
        choice = it.dispatch.steps.slots.owner[slot]
        assert choice is not None
        seen.append(choice.exchange.account.key_id)
        submit(slot, generation, request)

    monkeypatch.setattr(it.replica, "submit", spy)
    for _ in range(20):
        it.ask(key="hog", max_tokens=2)
    it.ask(key="other", max_tokens=2)
    it.ask(key="other", max_tokens=2, priority=-3)
    it.ask(key="vip", max_tokens=2, priority=60)
    it.ask(key="vip", max_tokens=2)
    it.loop.run()
    assert seen[:7] == ["hog", "vip", "other", "hog", "other", "hog", "hog"], "priority 60 is behind everybody's 0"
    assert seen.index("vip", 2) >= 16, "overtaken as often as one may be"
    assert len(it.records()) == 24


# Operations


def test_an_operation_is_generated_once(make: Make) -> None:
    it = make(key_settings={"alice": {}, "bob": {}})
    name = {"idempotency_key": "op-1"}
    first = it.ask(key="alice", max_tokens=5, headers=name)
    running = it.ask(key="alice", max_tokens=5, headers=name)
    assert running.status == 409
    assert error_of(running)["code"] == "operation_running"
    assert running.headers[b"x-should-retry"] == b"false", "OpenAI's SDKs repeat after a 409"
    assert it.ask(key="bob", max_tokens=5, headers=name).alive, "names of other keys are other names"
    it.loop.run()
    id = json.loads(first.body)["id"]
    again = it.ask(key="alice", max_tokens=5, headers=name)
    assert again.status == 409
    assert id in error_of(again)["message"]
    assert it.get("/v1/usage/" + id, key="alice")["operation"] == "op-1"
    assert sum(r.key == "alice" for r in it.records()) == 1
    assert it.accounting._accounts["alice"].streams == 0


def test_a_refused_operation_may_be_tried_again(make: Make) -> None:
    it = make(key_settings={"alice": {"max_streams": 1}})
    name = {"idempotency_key": "op-1"}
    blocker = it.ask(key="alice", stream=True, max_tokens=5)
    assert it.ask(key="alice", headers=name).status == 429
    it.loop.run()
    assert blocker.ended
    retried = it.ask(key="alice", max_tokens=5, headers=name)
    it.loop.run()
    assert retried.status == 200


def test_an_operation_is_known_after_a_restart_and_beyond_memory(make: Make, tmp_path: Path) -> None:
    it = make()
    for number in range(3):
        it.ask(max_tokens=2, headers={"idempotency_key": f"op-{number}"})
    it.loop.run()
    it.accounting.close()
    again = Metered(tmp_path)
    assert again.ask(headers={"idempotency_key": "op-2"}).status == 409
    known = again.accounting._operations
    assert isinstance(known, Operations)
    known._used.clear()
    known.forgot = True
    assert again.ask(headers={"idempotency_key": "op-0"}).status == 409, "the ledger was asked"
    again.loop.run()
    fresh = again.ask(max_tokens=2, headers={"idempotency_key": "op-9"})
    again.loop.run()
    assert fresh.status == 200
    again.accounting.close()
