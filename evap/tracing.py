"""OpenTelemetry spans (`--otel-endpoint`): one for each exchange, made from its stamps once it is over.

The loop puts plain values into a bounded queue and goes on. A thread makes spans of them and posts them with
OpenTelemetry's own OTLP exporter; while a collector is frozen or away the queue fills, and what does not fit is dropped
and counted.
Attributes are those of the semantic conventions for HTTP servers and for generative AI; no prompt or answer text.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from evap import __version__
from evap.errors import StartupError
from evap.protocol.trace_context import SAMPLED, TraceContext

logger = logging.getLogger("evap.tracing")
QUEUE_SPANS: Final = 4096
#: spans of one POST
BATCH: Final = 512
#: Longest time that a span waits for others to go with it.
GATHER_S: Final = 1.0
#: Of one POST with what the exporter tries again.
EXPORT_TIMEOUT_S: Final = 10.0
PATH: Final = "/v1/traces"
_REMEDY: Final = "pip install 'evap[otel]'"

Value = str | bool | int | float | Sequence[str]


class Ended(NamedTuple):
    """An exchange that is over. Times in ns since 1970. events: name and time. failed: by the server's
    fault."""

    context: TraceContext
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    events: Sequence[tuple[str, int]] = ()
    failed: bool = False


class Tracer:
    """Takes what has ended on any thread, and sends it from its own."""

    def __init__(self, spans: Any, exporter: Any, *, capacity: int = QUEUE_SPANS) -> None:
        self.dropped = 0
        self.exported = 0
        self._spans = spans
        self._exporter = exporter
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._working = True
        self._thread = threading.Thread(target=self._send_all, name="evap-otel", daemon=True)
        self._thread.start()

    def put(self, ended: Ended) -> None:
        """Queue it, or count it as dropped. Never waits."""
        if self._queue.qsize() >= self._capacity:
            self.dropped += 1
        else:
            self._queue.put(ended)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, for at most `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _send_all(self) -> None:
        running = True
        while running:
            batch, running = self._gather()
            if batch:
                self._send(batch)

    def _gather(self) -> tuple[list[Ended], bool]:
        batch: list[Ended] = []
        try:
            item = self._queue.get()
            while item is not None:
                batch.append(item)
                if len(batch) >= BATCH:
                    return batch, True
                item = self._queue.get(timeout=GATHER_S)
        except queue.Empty:
            return batch, True
        return batch, False

    def _send(self, batch: Sequence[Ended]) -> None:
        try:
            done = self._exporter.export([self._spans.make(ended) for ended in batch]).name == "SUCCESS"
        except Exception as error:  # noqa: BLE001 - whatever a collector makes it raise
            done = False
            logger.debug("spans could not be sent: %s", error)
        if done:
            self.exported += len(batch)
        else:
            self.dropped += len(batch)
        if done != self._working:
            self._working = done
            level = logging.INFO if done else logging.WARNING
            logger.log(level, "the collector of spans %s", "answers again" if done else "does not take them")


class _Spans:
    """Makes OpenTelemetry's spans."""

    def __init__(self, resource: Any) -> None:
        from opentelemetry import trace  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace import Event, ReadableSpan  # noqa: PLC0415
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

        self._trace, self._event, self._span = trace, Event, ReadableSpan
        self._resource = resource
        self._scope = InstrumentationScope("evap", __version__)

    def make(self, ended: Ended) -> Any:
        context, trace = ended.context, self._trace
        failed = trace.StatusCode.ERROR if ended.failed else trace.StatusCode.UNSET
        return self._span(
            name=ended.name, context=self._context(context, context.span_id, remote=False),
            parent=self._context(context, context.parent_id, remote=True) if context.parent_id else None,
            resource=self._resource, attributes=ended.attributes, kind=trace.SpanKind.SERVER,
            events=[self._event(name, timestamp=at_ns) for name, at_ns in ended.events],
            status=trace.Status(failed), start_time=ended.start_ns, end_time=ended.end_ns,
            instrumentation_scope=self._scope,
        )  # fmt: skip

    def _context(self, context: TraceContext, span_id: str, *, remote: bool) -> Any:
        trace = self._trace
        return trace.SpanContext(
            int(context.trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=trace.TraceFlags(context.flags),
            trace_state=trace.TraceState(list(context.state)),
        )  # fmt: skip


def start(endpoint: str, timeout_s: float = EXPORT_TIMEOUT_S) -> Tracer:
    """A tracer that posts to `endpoint`, "http://host:4318" or with a path of its own. Raises StartupError.

    OpenTelemetry reads OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS for itself.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartupError(
            f"--otel-endpoint {endpoint} is not the address of an OTLP/HTTP collector",
            remedy="--otel-endpoint http://localhost:4318",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    except ImportError as error:
        raise StartupError(f"--otel-endpoint needs OpenTelemetry: {error}", remedy=_REMEDY) from error
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line for each attempt; `_send` says it once
    url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + PATH
    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "evap"}))
    return Tracer(_Spans(resource), OTLPSpanExporter(endpoint=url, timeout=timeout_s))


def sampled(context: TraceContext | None) -> bool:
    """Whoever began the trace decides for all of it."""
    return context is not None and bool(context.flags & SAMPLED)
