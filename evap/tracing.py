"""OpenTelemetry spans (`--otel-endpoint`): one for each exchange, made from its stamps once it is over.

The loop writes plain values into a pipe and goes on; a process of its own (`span_process.py`) makes spans of them and
posts them. While a collector is frozen or away that process keeps some thousands and drops the rest; what the pipe does
not take is dropped here. All of it is counted, and nothing waits. No prompt or answer text is in a span.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import subprocess
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from evap import child
from evap.child import describe_end
from evap.errors import StartupError
from evap.protocol.trace_context import SAMPLED, TraceContext

logger = logging.getLogger("evap.tracing")
#: A pipe takes so many octets as a whole or not at all (PIPE_BUF).
MAX_FRAME: Final = 4096
#: What is asked for as the pipe's size: Linux gives a megabyte to anybody.
PIPE_BYTES: Final = 1 << 20
#: Of one POST with what the exporter tries again.
EXPORT_TIMEOUT_S: Final = 10.0
#: From a start of the process until the next, if it ends by itself.
RESTART_NS: Final = 30_000_000_000
PATH: Final = "/v1/traces"
LENGTH: Final = struct.Struct("<I")
#: words of the shared page: spans that were taken by the collector, refused by it, and dropped before they were sent
EXPORTED, REFUSED, DROPPED = 0, 1, 2
_REMEDY: Final = "pip install 'evap[otel]'"


class Ended(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An exchange that is over. Times in ns since 1970. attributes: str, bool, int, float or lists of str. events: name
    and time. failed: by the server's fault."""

    context: TraceContext
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]] = []
    failed: bool = False


_encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(Ended).decode


class Tracer:
    """Hands what has ended to the process. Used from the loop's thread only."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._lost = 0
        self._refused = False
        self._seen = (0, 0)
        memory = os.memfd_create("evap-spans")
        os.ftruncate(memory, mmap.PAGESIZE)
        self._memory = memory
        self._page = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("Q")
        self._arguments = (url, timeout_s, memory)
        self._started_ns = 0
        self._pipe = -1
        self._spawn()

    @property
    def exported(self) -> int:
        return self._page[EXPORTED]

    @property
    def dropped(self) -> int:
        return self._lost + self._page[REFUSED] + self._page[DROPPED]

    @property
    def pid(self) -> int:
        return self._process.pid

    def _spawn(self) -> None:
        theirs, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(OSError):  # a smaller one works as well
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._process = child.start("evap.span_process", self._arguments, [self._memory], stdin=theirs)
        os.close(theirs)

    def put(self, ended: Ended) -> None:
        """Hand it over, or count it as dropped. Never waits."""
        data = _encode(ended)
        if len(data) > MAX_FRAME - LENGTH.size:
            data = _encode(msgspec.structs.replace(ended, context=ended.context._replace(state=())))
        frame = LENGTH.pack(len(data)) + data
        try:
            if len(frame) > MAX_FRAME:
                raise BlockingIOError
            os.write(self._pipe, frame)
        except BlockingIOError:
            self._lost += 1
        except BrokenPipeError:
            self._lost += 1
            self._again(ended.end_ns)
        self._say()

    def _again(self, now_ns: int) -> None:
        """The process is gone: start it again, from time to time."""
        if now_ns - self._started_ns > RESTART_NS:
            self._started_ns = now_ns
            logger.error(
                "the process that sends spans ended: %s; starting it again", describe_end(self._process.wait())
            )
            os.close(self._pipe)
            self._spawn()

    def _say(self) -> None:
        """Once when the collector refuses spans, and once when it takes them again."""
        exported, refused = self._page[EXPORTED], self._page[REFUSED]
        before, self._seen = self._seen, (exported, refused)
        if refused != before[1] and not self._refused:
            self._refused = True
            logger.warning("the collector of spans does not take them")
        elif exported != before[0] and refused == before[1] and self._refused:
            self._refused = False
            logger.info("the collector of spans answers again")

    def close(self, timeout_s: float = 2.0) -> None:
        """Let the process send what it has, for at most `timeout_s`."""
        os.close(self._pipe)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._memory)
        self._say()


def start(endpoint: str, timeout_s: float = EXPORT_TIMEOUT_S) -> Tracer:
    """A tracer that posts to `endpoint`, "http://host:4318" or with a path of its own. Raises StartupError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartupError(
            f"--otel-endpoint {endpoint} is not the address of an OTLP/HTTP collector",
            remedy="--otel-endpoint http://localhost:4318",
        )
    if missing := [name for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http") if not _is(name)]:
        raise StartupError(f"--otel-endpoint needs {' and '.join(missing)}", remedy=_REMEDY)
    return Tracer(endpoint if parts.path.strip("/") else endpoint.rstrip("/") + PATH, timeout_s)


def _is(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def sampled(context: TraceContext | None) -> bool:
    """Whoever began the trace decides for all of it."""
    return context is not None and bool(context.flags & SAMPLED)
