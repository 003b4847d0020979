"""An OTLP/HTTP collector in a thread: it decodes what it is sent, and may answer nothing at all."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support import TIME_FACTOR


class Collector:
    """`spans`: (resource attributes, span) of everything that came, as protobuf has them."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[tuple[dict[str, Any], Any]] = []
        self.paths: set[str] = set()
        self.status = status
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.take(self.path, ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def take(self, path: str, request: Any) -> None:
        with self._changed:
            self.paths.add(path)
            for group in request.resource_spans:
                resource = plain(group.resource.attributes)
                self.spans += [(resource, span) for scope in group.scope_spans for span in scope.spans]
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float = 20.0 * TIME_FACTOR) -> list[tuple[dict[str, Any], Any]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans) >= count, timeout_s), self.spans
            return list(self.spans)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as Python values."""
    readers: dict[str, Callable[[Any], Any]] = {
        "string_value": str, "int_value": int, "double_value": float, "bool_value": bool,
        "array_value": lambda it: [value.string_value for value in it.values],
    }  # fmt: skip
    found = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        found[attribute.key] = readers[kind](getattr(attribute.value, kind))
    return found


def frozen() -> socket.socket:
    """A collector that takes connections and never reads a byte."""
    return socket.create_server(("127.0.0.1", 0), backlog=100)
