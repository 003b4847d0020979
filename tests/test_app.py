"""Every route has a handler, and whatever goes wrong in one is answered and goes no further."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evap import __version__
from evap.app import App, send_error
from evap.config import Config
from evap.errors import EngineFailed, MethodNotAllowed, RateLimited
from evap.metrics import Metrics
from evap.protocol.api.router import PREFIXES, ROUTES
from evap.protocol.events import PeerGone, RequestReady, StreamCancelled, WindowOpened
from tests.fakes import FakeCore, FakeReply, head, run_now
from tests.test_dispatch import House


class Front:
    def __init__(self) -> None:
        self.house = House()
        self.metrics = Metrics("synthetic")
        self.app = App(Config(), self.house.dispatch, self.metrics, created_s=1_700_000_000, background=run_now)
        self._streams = iter(range(1, 1000, 2))

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> FakeReply:
        reply = FakeReply(FakeCore(), next(self._streams))
        data = b"" if body is None else json.dumps(body).encode()
        self.app.on_event(RequestReady(reply, head(method, path, **headers), data))
        return reply

    def get(self, path: str) -> Any:
        reply = self.ask("GET", path)
        assert reply.ended
        return json.loads(reply.body)


@pytest.fixture
def front() -> Front:
    return Front()


def test_every_route_has_a_handler(front: Front) -> None:
    for path, route in [*ROUTES.items(), *((prefix + "synthetic", route) for prefix, route in PREFIXES.items())]:
        reply = front.ask(route.method, path, {"prompt": "x"} if route.method == "POST" else None)
        front.house.loop.run(1.0)
        assert reply.started, path
        assert reply.status < 500, path


def test_models(front: Front) -> None:
    (card,) = front.get("/v1/models")["data"]
    assert card["id"] == "synthetic"
    assert card["max_model_len"] == front.house.replica.info.max_model_len
    assert front.get("/v1/models/synthetic") == card
    assert front.ask("GET", "/v1/models/other").status == 404


def test_health_ready_version(front: Front) -> None:
    assert front.ask("GET", "/health").status == 200
    assert front.ask("GET", "/ready").status == 200
    assert front.get("/version")["version"] == __version__
    front.house.dispatch.draining = True
    assert front.ask("GET", "/ready").status == 503
    assert front.ask("GET", "/health").status == 200


def test_chat_goes_to_the_engine(front: Front) -> None:
    reply = front.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3})
    front.house.loop.run(10.0)
    assert json.loads(reply.body)["choices"][0]["finish_reason"] == "length"
    assert b"evap" in front.metrics.render()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/chat/completions", 400),
    ],
)
def test_refusals_have_openais_shape(front: Front, method: str, path: str, status: int) -> None:
    reply = front.ask(method, path)
    assert reply.status == status
    assert set(json.loads(reply.body)["error"]) == {"message", "type", "param", "code"}


def test_options_answers_with_allow(front: Front) -> None:
    reply = front.ask("OPTIONS", "/v1/models")
    assert (reply.status, reply.headers[b"allow"]) == (204, b"GET, HEAD, OPTIONS")


def test_a_fault_of_ours_is_a_500_without_its_text_and_a_traceback_in_the_log(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("private")

    monkeypatch.setattr(front.house.dispatch, "generate", broken)
    reply = front.ask("POST", "/v1/chat/completions", {})
    assert reply.status == 500
    assert b"private" not in reply.body
    assert "ZeroDivisionError: private" in caplog.text
    assert front.ask("GET", "/health").status == 200


def test_other_events_go_where_they_belong(front: Front) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    reply = front.ask("POST", "/v1/chat/completions", body)
    front.app.on_event(WindowOpened(reply))
    front.app.on_event(StreamCancelled(reply, "client_reset"))
    front.app.on_event(PeerGone())
    front.house.loop.run(1.0)
    assert front.house.end(reply) == "client_reset"


def test_send_error_carries_what_the_error_knows() -> None:
    reply = FakeReply(FakeCore(), 1)
    assert send_error(reply, RateLimited("slow down", retry_after_s=1.2)) == 429
    assert reply.headers[b"retry-after"] == b"2"
    reply = FakeReply(FakeCore(), 1)
    assert send_error(reply, MethodNotAllowed("no", allow="GET")) == 405
    assert reply.headers[b"allow"] == b"GET"
    assert send_error(FakeReply(FakeCore(), 1), EngineFailed("gone")) == 500
