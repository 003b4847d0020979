"""The process that makes OpenTelemetry's spans and posts them: `python -m evap.span_process ENDPOINT SECONDS PAGE`.

It reads what has ended from its standard input (frames of `tracing.py`) and ends with it. Making a span and its
protobuf form takes 0.2 ms of Python: a thread of the server would hold the interpreter's lock, and tokens would wait.
PAGE: descriptor of the shared page where it keeps its counts.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from evap import __version__
from evap.protocol.trace_context import TraceContext
from evap.tracing import DROPPED, EXPORTED, LENGTH, REFUSED, Ended, decode

QUEUE_SPANS: Final = 4096
#: spans of one POST
BATCH: Final = 512
#: Longest time that a span waits for others to go with it.
GATHER_S: Final = 1.0
#: At the end, for what is queued.
CLOSE_S: Final = 1.5


class Sender:
    """Takes what has ended, and sends it from a thread of its own. page: words that the server reads."""

    def __init__(self, resource: Any, exporter: Any, page: Any, *, capacity: int = QUEUE_SPANS) -> None:
        self._resource, self._exporter, self._page = resource, exporter, page
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="evap-otel", daemon=True)
        self._thread.start()

    def put(self, ended: Ended) -> None:
        """Queue it, or count it as dropped. Never waits."""
        if self._queue.qsize() >= self._capacity:
            self._page[DROPPED] += 1
        else:
            self._queue.put(ended)

    def close(self, timeout_s: float) -> None:
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
            done = self._exporter.export([span(ended, self._resource) for ended in batch]).name == "SUCCESS"
        except Exception:  # noqa: BLE001 - whatever a collector makes it raise
            done = False
        self._page[EXPORTED if done else REFUSED] += len(batch)


_SCOPE: Final = InstrumentationScope("evap", __version__)


def span(ended: Ended, resource: Any) -> ReadableSpan:
    """OpenTelemetry's span of an exchange."""
    context = TraceContext(*ended.context)
    return ReadableSpan(
        name=ended.name, context=_context(context, context.span_id, remote=False),
        parent=_context(context, context.parent_id, remote=True) if context.parent_id else None,
        resource=resource, attributes=ended.attributes, kind=trace.SpanKind.SERVER,
        events=[Event(name, timestamp=at_ns) for name, at_ns in ended.events],
        status=trace.Status(trace.StatusCode.ERROR if ended.failed else trace.StatusCode.UNSET),
        start_time=ended.start_ns, end_time=ended.end_ns, instrumentation_scope=_SCOPE,
    )  # fmt: skip


def _context(context: TraceContext, span_id: str, *, remote: bool) -> trace.SpanContext:
    return trace.SpanContext(
        int(context.trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=trace.TraceFlags(context.flags),
        trace_state=trace.TraceState([(key, value) for key, value in context.state]),
    )  # fmt: skip


def resource() -> Resource:
    """What OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say, and our name where they say none."""
    found = Resource.create({"service.version": __version__})
    if str(found.attributes["service.name"]).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "evap"}))
    return found


def frames(fd: int) -> Iterator[bytes]:
    """Whole frames from a pipe, until its other end is closed."""
    data = b""
    while more := os.read(fd, 1 << 16):
        data += more
        at = 0
        while len(data) - at >= LENGTH.size:
            end = at + LENGTH.size + LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                break
            yield data[at + LENGTH.size : end]
            at = end
        data = data[at:]


def main(argv: Sequence[str]) -> int:
    endpoint, seconds, descriptor = argv
    for name in (signal.SIGINT, signal.SIGTERM):  # of a whole group: the server's to act on
        signal.signal(name, signal.SIG_IGN)
    os.nice(5)  # tokens come first
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line for each attempt; the server says it once
    page = memoryview(mmap.mmap(int(descriptor), mmap.PAGESIZE)).cast("Q")
    sender = Sender(resource(), OTLPSpanExporter(endpoint=endpoint, timeout=float(seconds)), page)
    for frame in frames(0):
        sender.put(decode(frame))
    sender.close(CLOSE_S)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    os._exit(status)  # not later: an export that hangs must not hold up the end
