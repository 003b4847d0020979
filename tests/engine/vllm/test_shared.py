"""Shared memory, doorbell and log pipe, without an engine."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evap.engine.meter import map_file
from evap.engine.vllm.shared import BELL_FILE, RING_FILE, Bell, PipeHandler, Shared, parse_lines
from evap.ring import RingReader, RingWriter


@pytest.fixture
def shared() -> Iterator[Shared]:
    it = Shared(capacity=64)
    yield it
    it.close()


def test_what_the_engine_writes_is_read_here(shared: Shared) -> None:
    memory = map_file(shared.path / RING_FILE)
    writer, reader = RingWriter(memory, 64), RingReader(shared.ring.memory, 64)
    writer.write([1], [2], [3], [0], [0], 1)
    batch = reader.poll()
    assert batch is not None
    assert (batch.slot.tolist(), batch.token.tolist()) == ([1], [3])
    writer.close()
    reader.close()
    memory.close()


def test_the_bell_wakes_and_a_full_one_does_not_block(shared: Shared) -> None:
    bell = Bell(str(shared.path / BELL_FILE))
    with pytest.raises(BlockingIOError):
        os.read(shared.ring.bell_fd, 1)
    for _ in range(100_000):
        bell.ring()
    assert os.read(shared.ring.bell_fd, 4) == b"!!!!"
    bell.close()


def test_the_directory_is_private_and_goes_away() -> None:
    it = Shared(capacity=8)
    assert it.path.stat().st_mode & 0o077 == 0
    it.close()
    assert not it.path.exists()


LEAVES = """
import os
from evap.engine.vllm.shared import Shared
print(Shared().path, flush=True)
os._exit(9)
"""


def test_what_a_killed_process_left_is_swept() -> None:
    child = subprocess.run(
        [sys.executable, "-c", LEAVES],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.stdout
    left = Path(child.stdout.strip())
    assert left.is_dir()
    other = Shared(capacity=8)
    it = Shared(capacity=8)
    assert not left.exists()
    assert other.path.exists()  # its process lives
    it.close()
    other.close()


ENGINE = """
import sys, time
from evap.engine.vllm.shared import PipeHandler
handler = PipeHandler(sys.argv[1], owner=1)
print("up", flush=True)
time.sleep(600)
"""


def test_the_engines_processes_end_with_evaps(shared: Shared) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(shared.path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    assert child.poll() is None
    os.close(shared.log_fd)  # as when the process ends
    assert child.wait(30) == -signal.SIGTERM
    child.stdout.close()
    shared.log_fd = os.open(os.devnull, os.O_RDONLY)


def test_log_lines_arrive_whole(shared: Shared) -> None:
    handler = PipeHandler(str(shared.path / "log"))
    logger = logging.Logger("x")
    logger.addHandler(handler)
    logger.info("loading %d\nlines", 2)
    logger.error("x" * 100_000)
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed")
    lines = parse_lines(os.read(shared.log_fd, 1 << 16))
    assert lines[0][0] == logging.INFO
    assert lines[0][2] == "loading 2\nlines"
    assert lines[1][2].startswith("xxx")
    assert len(lines[1][2]) <= 3000
    assert lines[2][2] == "failed (ValueError: why)"
    handler.close()


def test_a_full_or_closed_pipe_loses_lines_and_nothing_else(shared: Shared) -> None:
    handler = PipeHandler(str(shared.path / "log"))
    logger = logging.Logger("x")
    logger.addHandler(handler)
    for _ in range(2000):
        logger.warning("y" * 200)
    os.read(shared.log_fd, 1 << 20)
    handler.close()
    logger.warning("nobody hears this")


def test_the_logging_file_is_a_valid_configuration(shared: Shared) -> None:
    with open(shared.logging_file()) as file:
        document = json.load(file)
    document["loggers"] = {"evap-test-vllm": document["loggers"]["vllm"]}
    logging.config.dictConfig(document)
    logging.getLogger("evap-test-vllm").warning("hello")
    assert parse_lines(os.read(shared.log_fd, 1 << 16))[0][2] == "hello"
    for handler in logging.getLogger("evap-test-vllm").handlers:
        handler.close()


def test_the_handlers_of_an_engines_last_start_are_closed(shared: Shared) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with open(shared.logging_file()) as file:
        document = json.load(file)
    document["loggers"] = {"evap-test-vllm": document["loggers"]["vllm"]}
    logging.config.dictConfig(document)
    before = descriptors()
    former = logging.getLogger("evap-test-vllm").handlers[0]
    logging.config.dictConfig(document)
    assert descriptors() == before
    former.handle(logging.makeLogRecord({"msg": "late"}))  # a thread may still have it: nothing is written anywhere
    [handler] = logging.getLogger("evap-test-vllm").handlers
    handler.close()
    handler.close()
    assert descriptors() == before - 1


def test_foreign_lines_are_dropped() -> None:
    assert parse_lines(b'nonsense\n[1]\n{"a":1}\n[20,"p","m"]\n[21,"p","m"]\n') == [(20, "p", "m")]
