"""Times and trailers of an answer: only for who asks, and right on a clock that is turned by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evap import epilogue
from evap.exchange import Exchange
from evap.protocol.api.router import dialects
from evap.protocol.trace_context import TraceContext
from tests.fakes import FakeReply, head
from tests.test_dispatch import House


def finished(*, stream: bool, **headers: str) -> tuple[FakeReply, Exchange]:
    house = House(synthetic_ttft_ms=20.0)
    reply = FakeReply(house.core, 1)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 11, "ignore_eos": True, "stream": stream}
    house.dispatch.generate(reply, head(**headers), json.dumps(body).encode(), dialects()["chat"])
    house.loop.run(10.0)
    return reply, house.settled[0][0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ["", "0", "true", "1 "])
def test_nobody_who_has_not_asked_is_told(stream: bool, asked: str) -> None:
    reply, exchange = finished(stream=stream, **({"evap_timing": asked} if asked else {}))
    assert (epilogue.timing(exchange), epilogue.headers(exchange), epilogue.comment(exchange)) == (b"", (), b"")
    assert b"server-timing" not in reply.headers
    assert b"server-timing" not in reply.body


def test_a_whole_answer_has_its_times_in_its_head() -> None:
    reply, _ = finished(stream=False, evap_timing="1")
    assert reply.headers[b"server-timing"] == b"queue;dur=0.000, ttft;dur=20.000, total;dur=30.000"


def test_a_stream_has_them_before_its_end() -> None:
    reply, exchange = finished(stream=True, evap_timing="1")
    assert b"server-timing" not in reply.headers
    assert reply.body.endswith(b"\n\n: server-timing %b\n\ndata: [DONE]\n\n" % epilogue.timing(exchange))


def test_a_trace_is_told_with_the_times() -> None:
    _, exchange = finished(stream=False, evap_timing="1")
    exchange.trace = TraceContext("ab" * 16, "cd" * 8, "ef" * 8)
    assert epilogue.timing(exchange).endswith(b'traceparent;desc="00-%b-%b-01"' % (b"ab" * 16, b"cd" * 8))


def test_trailers_are_for_who_takes_them() -> None:
    fields: dict[str, Any] = {"evap_timing": "1", "te": "trailers"}
    _, exchange = finished(stream=True, **fields)
    found = dict(epilogue.trailers(exchange))
    assert found[b"evap-usage-emitted"] == b"11"
    assert found[b"server-timing"] == epilogue.timing(exchange)
    exchange.reply.version = "1.1"
    assert epilogue.trailers(exchange) == ()
    _, exchange = finished(stream=True, evap_timing="1")
    assert epilogue.trailers(exchange) == ()
