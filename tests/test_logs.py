"""Logging: two formats, nothing a request can forge, and a stuck reader that stops nobody."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
from collections.abc import Iterator

import msgspec
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
    out, _ = written("text")
    logs.log_exchange(EXCHANGE, 1_700_000_000.25)
    flush()
    (line,) = out.getvalue().splitlines()
    assert ".250 info    exchange: id=chatcmpl-1 model=tiny method=POST path=/v1/chat/completions version=2" in line
    assert "ttft_ms=1.2 " in line
    assert "cached_tokens=0" in line
    assert "key_id" not in line


def test_json_line_of_an_exchange() -> None:
    out, _ = written("json")
    logs.log_exchange(EXCHANGE, 1_700_000_000.25)
    flush()
    line = json.loads(out.getvalue())
    assert (line["level"], line["logger"], line["msg"], line["id"]) == ("info", "exchange", "exchange", "chatcmpl-1")
    assert (line["emitted_tokens"], line["ttft_ms"], line["stream"]) == (4, 1.25, True)
    assert line["ts"] == "2023-11-14T22:13:20.250Z"
    assert "key_id" not in line


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_the_server_failed_is_a_warning(format: str) -> None:
    out, _ = written(format)
    logs.log_exchange(msgspec.structs.replace(EXCHANGE, status=200, end="engine_failed"), 0.0)
    logs.log_exchange(msgspec.structs.replace(EXCHANGE, status=499, end="client_gone"), 0.0)
    flush()
    first, second = out.getvalue().splitlines()
    assert "warning" in first
    assert "info" in second


@given(st.text(), st.text())
def test_no_text_of_an_exchange_makes_a_second_line(path: str, model: str) -> None:
    exchange = msgspec.structs.replace(EXCHANGE, path=path, model=model)
    assert logs.TextFormatter().exchange(exchange, 0.0).isprintable()
    try:
        line = logs.JsonFormatter().exchange(exchange, 0.0)
    except UnicodeEncodeError:  # half a surrogate pair, which no request can bring in
        return
    assert len(line.splitlines()) == 1
    assert (json.loads(line)["path"], json.loads(line)["model"]) == (path, model)


def test_many_lines_are_written_some_at_a_time_and_none_is_lost() -> None:
    out, log = written("json")
    for number in range(5 * logs.AT_ONCE):
        logs.log_exchange(msgspec.structs.replace(EXCHANGE, id=str(number)), 0.0)
    log.info("after them")
    logs.flush()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["id"] for line in lines[:-1]] == [str(number) for number in range(5 * logs.AT_ONCE)]
    assert lines[-1]["msg"] == "after them"


def test_levels() -> None:
    out, log = written("text", "warning")
    log.info("quiet")
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
    record = logging.makeLogRecord({"name": "evap.x", "levelname": "INFO", "msg": "%s", "args": (text,)})
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
