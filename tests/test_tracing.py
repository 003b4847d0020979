"""Spans reach a real collector; one that is frozen or away delays nobody and costs spans, which are counted."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from evap import tracing
from evap.errors import StartupError
from evap.protocol.trace_context import TraceContext
from evap.tracing import Ended, Tracer
from tests.collector import Collector, frozen, plain

TRACE, PARENT, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "53995c3f42cd8ad8"
ENDED = Ended(
    TraceContext(TRACE, SPAN, PARENT, 3, (("rojo", "1"), ("congo", "2"))), "chat tiny", 1_000, 5_000,
    {"gen_ai.request.model": "tiny", "gen_ai.usage.input_tokens": 7, "gen_ai.response.finish_reasons": ["stop"]},
    [("first token", 2_000)],
)  # fmt: skip


@pytest.fixture
def collector() -> Iterator[Collector]:
    it = Collector()
    yield it
    it.close()


def test_a_span_as_a_collector_reads_it(collector: Collector) -> None:
    tracer = tracing.start(collector.url)
    tracer.put(ENDED)
    tracer.put(ENDED._replace(context=TraceContext(TRACE, PARENT), failed=True))
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


def test_many_spans_go_in_few_posts(collector: Collector) -> None:
    tracer = tracing.start(collector.url)
    for _ in range(2 * tracing.BATCH + 1):
        tracer.put(ENDED)
    tracer.close(20.0)
    assert len(collector.spans) == tracer.exported == 2 * tracing.BATCH + 1


def test_a_frozen_collector_costs_spans_and_no_time() -> None:
    """`put` is called on the loop: it returns whatever the collector does. The exporter's thread is stuck all the while
    (its time-out is an hour), so that a `put` that waited for it would never return."""
    with frozen() as listening:
        tracer = tracing.start(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=3600.0)
        count = tracing.QUEUE_SPANS + 2 * tracing.BATCH
        for _ in range(count):
            tracer.put(ENDED)
        assert tracer.exported == 0
        assert tracing.BATCH <= tracer.dropped <= 2 * tracing.BATCH
        tracer.close(0.01)


@pytest.mark.parametrize("how", ["away", "failing"])
def test_a_collector_that_takes_nothing_is_said_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    if how == "away":
        with frozen() as listening:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        tracer = tracing.start(url, timeout_s=0.2)
    else:
        failing = Collector(status=400)
        tracer = tracing.start(failing.url, timeout_s=0.2)
    for _ in range(tracing.BATCH + 1):
        tracer.put(ENDED)
    tracer.close(30.0)
    assert (tracer.exported, tracer.dropped) == (0, tracing.BATCH + 1)
    assert [r.getMessage() for r in caplog.records] == ["the collector of spans does not take them"]
    if how == "failing":
        failing.close()


class _Exporter:
    def __init__(self, *results: str | Exception) -> None:
        self.results = list(results)

    def export(self, spans: object) -> object:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return type("Result", (), {"name": result})


class _Spans:
    def make(self, ended: Ended) -> Ended:
        return ended


def test_whatever_an_exporter_raises_the_next_spans_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tracer = Tracer(_Spans(), _Exporter(ValueError("odd"), "SUCCESS"))
    for _ in range(tracing.BATCH + 1):
        tracer.put(ENDED)
    tracer.close(20.0)
    assert (tracer.exported, tracer.dropped) == (1, tracing.BATCH)
    assert caplog.records[-1].getMessage() == "the collector of spans answers again"
    assert not [t for t in threading.enumerate() if t.name == "evap-otel" and t.is_alive() and t is tracer._thread]


@pytest.mark.parametrize("bad", ["localhost:4318", "grpc://x:4317", "http://", "x"])
def test_an_endpoint_that_is_none(bad: str) -> None:
    with pytest.raises(StartupError, match="OTLP/HTTP"):
        tracing.start(bad)


def test_without_the_extra_the_remedy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupError) as caught:
        tracing.start("http://localhost:4318")
    assert caught.value.remedy == "pip install 'evap[otel]'"
