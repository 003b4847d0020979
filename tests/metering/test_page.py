"""The counters page: what a reader may rely on, what is left after a crash, and what is refused."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.metering import layout
from evap.metering.page import PageReader, Row, format_page, map_page_file, open_page_file
from evap.metering.writer import Join, NumpyMeter

SLOTS = 4


def new_page(slots: int = SLOTS) -> bytearray:
    memory = bytearray(layout.page_bytes(slots))
    format_page(memory, slots, epoch_device_ns=0, epoch_unix_ns=5_000, nonce=77)
    return memory


def test_an_empty_page_says_nothing() -> None:
    reader = PageReader(new_page())
    assert [reader.row(s) for s in range(SLOTS)] == [None] * SLOTS
    assert [reader.last_row(s) for s in range(SLOTS)] == [None] * SLOTS
    assert reader.step_line() is None
    assert reader.heartbeat() == 0
    assert not reader.rows()[1].any()
    assert (reader.nonce, reader.unix_ns(3)) == (77, 8_000)


@given(st.integers(0, 7), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_writer_that_dies_in_a_line_costs_at_most_one_step(words: int, step: int) -> None:
    """The first `words` of the eight stores of one more step arrive, in the writer's order: word 0 last."""
    memory = new_page()
    meter = NumpyMeter(memory)
    meter.begin([Join(1, 5, 10)], 0)
    one, token = np.array([1], np.int32), np.array([[4]], np.int32)
    for n in range(step):
        meter.step(one, token, None, 1000 * (n + 1))
    before = bytes(memory)
    meter.step(one, token, None, 1_000_000)
    torn = bytearray(before)
    for word in list(reversed(range(8)))[:words]:
        at = (layout.WORD_ROWS + layout.LINE_WORDS + word) * 8
        torn[at : at + 8] = memory[at : at + 8]
    reader = PageReader(torn)
    if words:
        assert reader.row(1) is None
    last = reader.last_row(1)
    assert last is not None
    assert last.computed in (step, step + 1)
    # The next writer's first line can be told from the torn one, and is read whole.
    successor = NumpyMeter(torn)
    successor.begin([Join(1, 6, 11)], 0)
    assert reader.row(1) == Row(6, 0, 11, 0, 0, 0, 0, 0, 0)


def test_words_of_two_generations_are_never_taken_for_one() -> None:
    memory = new_page()
    meter = NumpyMeter(memory)
    meter.begin([Join(1, 5, 10)], 0)
    meter.step(np.array([1], np.int32), np.array([[4]], np.int32), None, 1000)
    before = bytes(memory)
    meter.begin([Join(1, 6, 20)], 0)
    for words in range(8):
        torn = bytearray(before)
        for word in list(reversed(range(8)))[:words]:
            at = (layout.WORD_ROWS + layout.LINE_WORDS + word) * 8
            torn[at : at + 8] = memory[at : at + 8]
        last = PageReader(torn).last_row(1)
        assert last is not None
        assert last.generation == 5


def test_foreign_memory_is_refused() -> None:
    good = new_page()
    for offset, message in ((0, "not a counters page"), (12, "of version"), (8, "needs")):
        bad = bytearray(good)
        bad[offset] ^= 1
        with pytest.raises(ValueError, match=message):
            PageReader(bad)
    with pytest.raises(ValueError, match="too short"):
        PageReader(b"short")
    with pytest.raises(ValueError, match="needs"):
        PageReader(good[:-1])
    with pytest.raises(ValueError, match="bytes are needed"):
        format_page(bytearray(100), 4, epoch_device_ns=0, epoch_unix_ns=0)


def test_a_page_file_is_allocated_and_mapped_again(tmp_path: Path) -> None:
    path = tmp_path / "page"
    memory = open_page_file(path, SLOTS)
    format_page(memory, SLOTS, epoch_device_ns=0, epoch_unix_ns=0)
    assert path.stat().st_blocks * 512 >= layout.page_bytes(SLOTS)
    assert path.stat().st_mode & 0o777 == 0o600
    NumpyMeter(memory).begin([Join(3, 2, 9)], 0)
    again, slots = map_page_file(path)
    assert slots == SLOTS
    reader = PageReader(again)
    assert reader.row(3) == Row(2, 0, 9, 0, 0, 0, 0, 0, 0)
    reader.close()
    again.close()
    memory.close()
    (tmp_path / "empty").write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="not a counters page"):
        map_page_file(tmp_path / "empty")


def test_a_full_disk_is_an_oserror_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        open_page_file(tmp_path / "page", SLOTS)


WRITER = """
import sys
import numpy as np
from pathlib import Path
from evap.metering.page import map_page_file
from evap.metering.writer import Join, NumpyMeter
page, slots = map_page_file(Path(sys.argv[1]))
meter = NumpyMeter(page)
meter.begin([Join(slot, 1, 7) for slot in range(slots)], 0)
everyone, step = np.arange(slots, dtype=np.int32), 0
tokens = np.zeros((slots, 1), np.int32)
while True:
    step += 1
    meter.step(everyone, tokens, None, 1000 * step)
    if step == 3:
        print("running", flush=True)
"""


def test_another_process_reads_while_it_writes_and_after_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "page"
    memory = open_page_file(path, SLOTS)
    format_page(memory, SLOTS, epoch_device_ns=0, epoch_unix_ns=0)
    reader = PageReader(memory)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "running\n"
            for _ in range(300):
                step = reader.heartbeat()
                for slot in range(SLOTS):
                    row = reader.row(slot)
                    assert row is None or (row.computed == row.emitted == row.steps == row.last_us >= step)
        finally:
            writer.send_signal(signal.SIGKILL)
    counts = {row.computed for row in map(reader.last_row, range(SLOTS)) if row is not None}
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= reader.heartbeat()
