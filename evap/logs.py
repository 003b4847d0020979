"""Logging: text lines for people, JSON lines for machines, on stderr, from a thread of their own.

A log reader that has stopped reading must never stop the server: records go through a bounded queue; when it is full
they are dropped and counted, and the count is logged when there is room again. No prompt and no answer is ever logged:
`Exchange` is the closed list of what one line about a request may say. Those lines, of which there may be thousands a
second, are made by the writing thread, and written some at a time.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec
from msgspec import UNSET, UnsetType

QUEUE_RECORDS: Final = 10_000
#: Longest time that the next lines are gathered for, after some were written.
GATHER_S: Final = 0.01
#: lines of one write
AT_ONCE: Final = 100
#: Ends of an exchange, and codes of errors, that are the server's fault.
FAULTS: Final = frozenset(("engine_failed", "engine_unavailable", "internal_error"))


class Exchange(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What may be said about one request, once it is settled. UNSET: nothing to say. Status 499 is a client that left
    before it had one (nginx's "client closed request")."""

    id: str
    request_id: str | UnsetType = UNSET  # the client's X-Request-Id
    trace_id: str | UnsetType = UNSET
    key_id: str | UnsetType = UNSET
    model: str
    method: str
    path: str
    version: str  # "2" | "1.1" | "1.0"
    peer: str
    stream: bool = False
    choices: int = 0  # that reached the engine
    status: int
    end: str  # "stop" | "length" | "budget" | "client_reset" | "client_gone" | "stalled" | "drain" | an error's code
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    emitted_tokens: int = 0
    delivered_tokens: int = 0
    queue_ms: float | UnsetType = UNSET  # until the engine was given it
    ttft_ms: float | UnsetType = UNSET
    total_ms: float = 0.0


_encode: Final = msgspec.json.Encoder().encode


def log_exchange(exchange: Exchange, at_s: float) -> None:
    """One line per exchange. at_s: Unix time. A warning if the server failed it, else information: a client that went
    away is not an error of ours. Costs its caller a microsecond or two."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.put((exchange, at_s))


def _level(exchange: Exchange) -> str:
    return "warning" if exchange.status >= 500 or exchange.end in FAULTS else "info"


def printable(text: str) -> str:
    """`text` on one line: whatever could forge a second line or move a terminal's cursor is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class TextFormatter(logging.Formatter):
    """`12:00:00.123 info  server: message key=value`; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        line = f"{clock} {record.levelname.lower():7} {_short(record.name)}: {record.getMessage()}"
        return printable(line) + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")

    def exchange(self, exchange: Exchange, at_s: float) -> str:
        clock = f"{_clock(int(at_s))}.{int(at_s % 1 * 1000):03}"
        values = ((name, getattr(exchange, name)) for name in exchange.__struct_fields__)
        fields = " ".join([f"{name}={_text(value)}" for name, value in values if value is not UNSET])
        return printable(f"{clock} {_level(exchange):7} exchange: {fields}")


class JsonFormatter(logging.Formatter):
    """One object a line: ts (RFC 3339, UTC), level, logger, msg, and the fields of an exchange."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": _short(record.name),
        }
        line["msg"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, separators=(",", ":"))  # ASCII: nothing can pose as a line break

    def exchange(self, exchange: Exchange, at_s: float) -> str:
        fields = _encode(exchange)
        if not fields.isascii():
            fields = json.dumps(json.loads(fields), separators=(",", ":")).encode()
        head = f'{{"ts":"{_rfc3339(at_s)}","level":"{_level(exchange)}","logger":"exchange","msg":"exchange",'
        return head + fields[1:].decode()


@functools.lru_cache(maxsize=4)
def _clock(second: int) -> str:
    return datetime.fromtimestamp(second).astimezone().strftime("%H:%M:%S")


def _rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _short(name: str) -> str:
    return name.removeprefix("evap.")


def _text(value: object) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
    return repr(text) if " " in text else text


class _Handler(logging.Handler):
    """Records are formatted on the caller's thread (their arguments may change later), exchanges on the one that writes
    them."""

    def __init__(self, stream: TextIO, formatter: TextFormatter | JsonFormatter, capacity: int = QUEUE_RECORDS) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped = 0  # since it was last said
        self.lost = 0  # in all
        self._exchange = formatter.exchange
        self._stream = stream
        self._capacity = capacity
        self._queue: queue.SimpleQueue[str | tuple[Exchange, float] | threading.Event | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="evap-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.put(self.format(record))
        except Exception:  # noqa: BLE001  # logging's own contract: a bad log call must not break its caller
            self.handleError(record)

    def put(self, line: str | tuple[Exchange, float]) -> None:
        """Queue it, or count it as dropped. Never waits."""
        if self._queue.qsize() >= self._capacity:
            self.dropped += 1
            self.lost += 1
            return
        if self.dropped:
            missed, self.dropped = self.dropped, 0
            self._queue.put(self.format(logging.makeLogRecord({
                "name": "evap.logs", "levelno": logging.WARNING, "levelname": "WARNING",
                "msg": f"{missed} log lines were dropped: nobody read them in time",
            })))  # fmt: skip
        self._queue.put(line)

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until what is queued now is written, for at most `timeout_s`."""
        if self._thread.is_alive():
            written = threading.Event()
            self._queue.put(written)
            self._hurry.set()
            written.wait(timeout_s)

    def finish(self, timeout_s: float = 1.0) -> None:
        """Write what is queued, for at most `timeout_s`, and end the thread."""
        self._queue.put(None)
        self._hurry.set()
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while self._write_some(self._queue.get()):
            if self._queue.empty():
                self._hurry.wait(GATHER_S)

    def _write_some(self, item: str | tuple[Exchange, float] | threading.Event | None) -> bool:
        """`item` and what is queued behind it. False at the end, or when the reader is gone: the server goes on without
        a log."""
        lines: list[str] = []
        try:
            while isinstance(item, (str, tuple)):
                lines.append(item if isinstance(item, str) else self._exchange(*item))
                if len(lines) >= AT_ONCE or self._queue.empty():
                    break
                item = self._queue.get()
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
        except (OSError, ValueError):
            return False
        if isinstance(item, threading.Event):
            self._hurry.clear()
            item.set()
        return item is not None


def dropped() -> int:
    """Lines that were dropped so far because nobody read them in time."""
    return sum(handler.lost for handler in logging.getLogger().handlers if isinstance(handler, _Handler))


def flush() -> None:
    """Write out what has been logged so far (for at most a second), so that what follows on stderr follows it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.flush()


def configure(level: str, format: str, stream: TextIO | None = None) -> None:
    """Send every record at `level` ("debug" | "info" | "warning" | "error") and above to `stream` (default: stderr).

    Safe to call again: the earlier destination is replaced.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(handler)
        handler.finish()
    handler = _Handler(stream or sys.stderr, JsonFormatter() if format == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # libraries are heard when something is wrong
    logging.getLogger("evap").setLevel(level.upper())
    logging.captureWarnings(True)
    atexit.register(handler.finish)
