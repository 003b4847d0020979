"""Logging: text lines for people, JSON lines for machines, on stderr, from a thread of their own.

A log reader that has stopped reading must never stop the server: records go through a bounded queue; when it is full
they are dropped and counted, and the count is logged when there is room again. No prompt and no answer is ever logged:
`Exchange` is the closed list of what one line about a request may say.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec

QUEUE_RECORDS: Final = 10_000
#: What a record may carry besides its message, under this attribute name.
FIELDS: Final = "evap_fields"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What may be said about one request, once it is settled. `end` says why it ended; 499 is a client that left."""

    id: str
    method: str
    path: str
    status: int
    version: str  # "2" | "1.1"
    peer: str
    end: str  # "stop" | "length" | "client_reset" | "client_gone" | "stalled" | "drain" | "error" | "refused"
    key_id: str = ""
    model: str = ""
    stream: bool = False
    choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    emitted_tokens: int = 0
    delivered_tokens: int = 0
    queue_ms: float | None = None  # until the engine was given it
    ttft_ms: float | None = None
    total_ms: float = 0.0


def log_exchange(logger: logging.Logger, exchange: Exchange) -> None:
    """One line per exchange, at info: a client that went away is not an error of ours."""
    if logger.isEnabledFor(logging.INFO):
        fields = msgspec.to_builtins(exchange)
        logger.info("exchange", extra={FIELDS: {k: v for k, v in fields.items() if v not in ("", None)}})


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
        line += "".join(f" {key}={_text(value)}" for key, value in getattr(record, FIELDS, {}).items())
        return printable(line) + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """One object a line: ts (RFC 3339, UTC), level, logger, msg, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        ts = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {"ts": ts, "level": record.levelname.lower(), "logger": _short(record.name)}
        line["msg"] = record.getMessage()
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, separators=(",", ":"))  # ASCII: nothing can pose as a line break


def _short(name: str) -> str:
    return name.removeprefix("evap.")


def _text(value: object) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
    return repr(text) if " " in text else text


class _Handler(logging.Handler):
    """Formats on the caller's thread (the arguments may change later), writes on its own."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter, capacity: int = QUEUE_RECORDS) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped = 0  # since it was last said
        self.lost = 0  # in all
        self._stream = stream
        self._queue: queue.Queue[str | threading.Event | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._write_all, name="evap-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self.dropped and not self._queue.full():
            missed, self.dropped = self.dropped, 0
            self.emit(logging.makeLogRecord({
                "name": "evap.logs", "levelno": logging.WARNING, "levelname": "WARNING",
                "msg": f"{missed} log lines were dropped: nobody read them in time",
            }))  # fmt: skip
        try:
            self._queue.put_nowait(self.format(record))
        except queue.Full:
            self.dropped += 1
            self.lost += 1
        except Exception:  # noqa: BLE001  # logging's own contract: a bad log call must not break its caller
            self.handleError(record)

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until what is queued now is written, for at most `timeout_s`."""
        written = threading.Event()
        try:
            self._queue.put(written, timeout=timeout_s if self._thread.is_alive() else 0.0)
        except queue.Full:
            return
        if self._thread.is_alive():
            written.wait(timeout_s)

    def finish(self, timeout_s: float = 1.0) -> None:
        """Write what is queued, for at most `timeout_s`, and end the thread."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                if isinstance(line, threading.Event):
                    self._stream.flush()
                    line.set()
                    continue
                self._stream.write(line + "\n")
                if self._queue.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # the reader is gone: the server goes on without a log
                return


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
