"""Logging: two formats, nothing a request can forge, and a stuck reader that stops nobody."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap import logs

EXCHANGE = logs.Exchange(
    id="chatcmpl-1", method="POST", path="/v1/chat/completions", status=200, version="2", peer="127.0.0.1:5",
    end="stop", model="tiny", stream=True, prompt_tokens=3, emitted_tokens=4, delivered_tokens=4,
    ttft_ms=1.25, total_ms=9.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root, evap = logging.getLogger(), logging.getLogger("evap")
    before = (root.handlers[:], root.level, evap.level)
    yield
    for handler in [h for h in root.handlers if h not in before[0]]:
        root.removeHandler(handler)
        handler.finish()  # type: ignore[attr-defined]
    root.setLevel(before[1])
    evap.setLevel(before[2])
    logging.captureWarnings(False)


def written(format: str, level: str = "info") -> tuple[io.StringIO, logging.Logger]:
    out = io.StringIO()
    logs.configure(level, format, out)
    return out, logging.getLogger("evap.server")


flush = logs.flush


def test_text_line_of_an_exchange() -> None:
    out, log = written("text")
    logs.log_exchange(log, EXCHANGE)
    flush()
    (line,) = out.getvalue().splitlines()
    assert " info    server: exchange id=chatcmpl-1 method=POST path=/v1/chat/completions status=200" in line
    assert "ttft_ms=1.2" in line
    assert "key_id" not in line


def test_json_line_of_an_exchange() -> None:
    out, log = written("json")
    logs.log_exchange(log, EXCHANGE)
    flush()
    line = json.loads(out.getvalue())
    assert (line["level"], line["logger"], line["msg"], line["id"]) == ("info", "server", "exchange", "chatcmpl-1")
    assert (line["emitted_tokens"], line["ttft_ms"], line["stream"]) == (4, 1.25, True)
    assert line["ts"].endswith("Z")


def test_levels() -> None:
    out, log = written("text", "warning")
    log.info("quiet")
    logs.log_exchange(log, EXCHANGE)
    log.warning("loud")
    logging.getLogger("somebody.else").info("never")
    flush()
    assert [line.split(": ", 1)[1] for line in out.getvalue().splitlines()] == ["loud"]


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_traceback_is_kept(format: str) -> None:
    out, log = written(format)
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("it broke")
    flush()
    assert "it broke" in out.getvalue()
    assert "ValueError: boom" in out.getvalue()


@given(st.text())
def test_no_text_makes_a_second_line_or_an_escape_sequence(text: str) -> None:
    record = logging.makeLogRecord(
        {"name": "evap.x", "levelname": "INFO", "msg": "%s", "args": (text,), logs.FIELDS: {"id": text}}
    )
    plain = logs.TextFormatter().format(record)
    assert plain.isprintable()
    line = logs.JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["logger"] == "x"


def test_a_reader_that_has_stopped_blocks_nobody_and_lines_are_counted() -> None:
    read_end, write_end = os.pipe()
    stream = open(write_end, "w")  # noqa: SIM115
    handler = logs._Handler(stream, logs.TextFormatter(), capacity=8)
    record = logging.makeLogRecord({"name": "evap", "levelname": "INFO", "msg": "x" * 5000})
    for _ in range(200):  # far more than the pipe and the queue hold together
        handler.emit(record)
    assert handler.dropped > 0
    text: list[str] = []
    with open(read_end) as reader:
        thread = threading.Thread(target=lambda: text.append(reader.read()))
        thread.start()  # somebody reads again
        while handler.dropped:
            handler.emit(record)
        handler.finish(30)
        stream.close()
        thread.join(30)
    assert "log lines were dropped" in text[0]


def test_a_reader_that_is_gone_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = open(write_end, "w")  # noqa: SIM115
    handler = logs._Handler(stream, logs.TextFormatter())
    handler.emit(logging.makeLogRecord({"name": "evap", "levelname": "INFO", "msg": "x"}))
    handler.finish(30)
    assert not handler._thread.is_alive()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_flush_does_not_wait_for_a_dead_reader() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = open(write_end, "w")  # noqa: SIM115
    handler = logs._Handler(stream, logs.TextFormatter(), capacity=1)
    handler.emit(logging.makeLogRecord({"name": "evap", "levelname": "INFO", "msg": "x"}))
    handler.finish(30)
    assert not handler._thread.is_alive()
    handler.flush(3600)
    handler.flush(3600)
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_configure_again_replaces_the_destination() -> None:
    first, log = written("text")
    second, _ = written("text")
    log.info("once")
    flush()
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
