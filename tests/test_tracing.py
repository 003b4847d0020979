"""Spans reach a real collector; one that is frozen or away delays nobody and costs spans, which are counted."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator

import msgspec
import pytest

from evap import tracing
from evap.errors import StartupError
from evap.protocol.trace_context import TraceContext
from evap.tracing import Ended
from tests.clients.asking import eventually
from tests.collector import Collector, frozen, plain
from tests.support import TIME_FACTOR

TRACE, PARENT, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "53995c3f42cd8ad8"
ENDED = Ended(
    context=TraceContext(TRACE, SPAN, PARENT, 3, (("rojo", "1"), ("congo", "2"))), name="chat tiny", start_ns=1_000,
    end_ns=5_000, events=[("first token", 2_000)],
    attributes={"gen_ai.request.model": "tiny", "gen_ai.usage.input_tokens": 7, "x": 0.5, "y": True,
                "gen_ai.response.finish_reasons": ["stop"]},
)  # fmt: skip
PATIENCE_S = 30.0 * TIME_FACTOR


@pytest.fixture
def collector() -> Iterator[Collector]:
    it = Collector()
    yield it
    it.close()


def test_a_span_as_a_collector_reads_it(collector: Collector) -> None:
    tracer = tracing.start(collector.url)
    tracer.put(ENDED)
    tracer.put(msgspec.structs.replace(ENDED, context=TraceContext(TRACE, PARENT), failed=True))
    tracer.close(20.0)
    (resource, span), (_, other) = collector.wait(2)
    assert collector.paths == {"/v1/traces"}
    assert resource["service.name"] == "evap"
    assert (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN, PARENT)
    assert (span.name, span.start_time_unix_nano, span.end_time_unix_nano) == ("chat tiny", 1_000, 5_000)
    assert (span.kind, span.trace_state) == (2, "rojo=1,congo=2")
    assert plain(span.attributes) == ENDED.attributes
    assert [(event.name, event.time_unix_nano) for event in span.events] == [("first token", 2_000)]
    assert (span.status.code, other.status.code, other.parent_span_id) == (0, 2, b"")
    assert (tracer.exported, tracer.dropped) == (2, 0)


def test_a_path_of_its_own_is_kept(collector: Collector) -> None:
    tracer = tracing.start(collector.url + "/otlp/traces")
    tracer.put(ENDED)
    tracer.close(20.0)
    assert collector.paths == {"/otlp/traces"}


def test_a_service_name_may_be_given(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracer = tracing.start(collector.url)
    tracer.put(ENDED)
    tracer.close(20.0)
    assert collector.spans[0][0]["service.name"] == "mine"


def test_none_of_many_is_lost(collector: Collector) -> None:
    tracer = tracing.start(collector.url)
    for _ in range(1500):
        tracer.put(ENDED)
    tracer.close(20.0)
    assert tracer.exported + tracer.dropped == 1500
    assert len(collector.spans) == tracer.exported
    assert tracer.exported > 1000, "the pipe takes a megabyte while the process starts"


def test_a_long_state_is_left_out_and_a_huge_span_is_dropped(collector: Collector) -> None:
    tracer = tracing.start(collector.url)
    long = ENDED.context._replace(state=tuple((f"k{n}", "x" * 250) for n in range(16)))
    tracer.put(msgspec.structs.replace(ENDED, context=long))
    tracer.put(msgspec.structs.replace(ENDED, attributes={"x": "y" * 5000}))
    tracer.close(20.0)
    (_, span) = collector.wait(1)[0]
    assert span.trace_state == ""
    assert (tracer.exported, tracer.dropped) == (1, 1)


@pytest.mark.parametrize("how", ["collector", "process"])
def test_whatever_is_frozen_costs_spans_and_no_time(how: str) -> None:
    """`put` is called on the loop: it returns, whatever the collector or the process that serves it does. Each time-out
    is an hour: a `put` that waited for one would never return."""
    with frozen() as listening:
        tracer = tracing.start(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=3600.0)
        if how == "process":
            os.kill(tracer.pid, signal.SIGSTOP)
        for _ in range(5000 if how == "process" else 20_000):
            tracer.put(ENDED)
        eventually(lambda: tracer.dropped > 0, "spans are dropped", PATIENCE_S)
        assert tracer.exported == 0
        tracer.close(0.01)


@pytest.mark.parametrize("how", ["away", "failing"])
def test_a_collector_that_takes_nothing_is_said_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    if how == "away":
        with frozen() as listening:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    else:
        failing = Collector(status=400)
        url = failing.url
    tracer = tracing.start(url, timeout_s=0.2)
    tracer.put(ENDED)
    eventually(lambda: tracer.dropped == 1, "the span is dropped", PATIENCE_S)
    tracer.put(ENDED)
    tracer.close(30.0)
    assert (tracer.exported, tracer.dropped) == (0, 2)
    assert [r.getMessage() for r in caplog.records] == ["the collector of spans does not take them"]
    if how == "failing":
        failing.close()


def test_a_collector_that_comes_back_is_said(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    collector.status = 400
    tracer = tracing.start(collector.url)
    tracer.put(ENDED)
    eventually(lambda: tracer.dropped == 1, "the span is dropped", PATIENCE_S)
    tracer._say()
    collector.status = 200
    tracer.put(ENDED)
    tracer.close(20.0)
    assert caplog.records[-1].getMessage() == "the collector of spans answers again"


def test_a_process_that_was_killed_is_started_again(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    tracer = tracing.start(collector.url)
    first = tracer.pid
    os.kill(first, signal.SIGKILL)
    tracer._process.wait()
    late = msgspec.structs.replace(ENDED, end_ns=time.time_ns())
    tracer.put(late)
    assert tracer.dropped == 1
    assert "killed by SIGKILL; starting it again" in caplog.text
    tracer.put(late)
    tracer.close(20.0)
    assert tracer.pid != first
    assert (tracer.exported, tracer.dropped) == (1, 1)


@pytest.mark.parametrize("bad", ["localhost:4318", "grpc://x:4317", "http://", "x"])
def test_an_endpoint_that_is_none(bad: str) -> None:
    with pytest.raises(StartupError, match="OTLP/HTTP"):
        tracing.start(bad)


def test_without_the_extra_the_remedy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(StartupError) as caught:
        tracing.start("http://localhost:4318")
    assert caught.value.remedy == "pip install 'evap[otel]'"
    assert not tracing._is("opentelemetry.nothing.of.the.kind")
