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
from evap.metering import page as page_module
from evap.metering.page import HostRow, HostRows, PageReader, Row, format_page, map_page_file, open_page_file
from evap.metering.writer import Join, NumpyMeter

SLOTS = 4


def new_page(slots: int = SLOTS) -> bytearray:
    memory = bytearray(layout.page_bytes(slots))
    format_page(memory, slots, epoch_device_ns=0, epoch_unix_ns=5_000, nonce=77)
    return memory


def test_an_empty_page_says_nothing() -> None:
    reader = PageReader(new_page())
    assert [reader.row(s) for s in range(SLOTS)] == [None] * SLOTS
    assert reader.host_row(0) is None
    assert reader.step_line() is None
    assert reader.heartbeat() == 0
    assert reader.note(0, 0) is None
    assert reader.survivors() == []
    assert not reader.rows()[1].any()
    assert (reader.nonce, reader.unix_ns(3)) == (77, 8_000)


def test_host_rows_and_notes_come_back() -> None:
    memory = new_page()
    rows, reader = HostRows(memory), PageReader(memory)
    rows.open(2, 9, 1000, b"exchange 1")
    rows.open(0, 65535, 1001, b"x" * page_module.MAX_NOTE_BYTES)
    rows.count(np.array([2, 0]), np.array([5, 6]), np.array([3, 4]))
    assert reader.host_row(2) == HostRow(9, layout.PHASE_OPEN, 5, 3, 1000, 0)
    assert reader.note(2, 9) == b"exchange 1"
    assert reader.note(2, 8) is None
    assert [s.slot for s in reader.survivors()] == [0, 2]
    rows.close(2, 2000)
    assert reader.host_row(2) == HostRow(9, layout.PHASE_SETTLED, 5, 3, 1000, 2000)
    assert [s.slot for s in reader.survivors()] == [0]
    with pytest.raises(ValueError, match="at most"):
        rows.open(1, 1, 0, b"x" * (page_module.MAX_NOTE_BYTES + 1))


def test_a_survivor_has_the_engines_row_of_its_own_generation_only() -> None:
    memory = new_page()
    rows, meter, reader = HostRows(memory), NumpyMeter(memory), PageReader(memory)
    meter.begin([Join(1, 5, 10, 2)], 0)
    meter.step(np.array([1], np.int32), np.array([[4, 5]], np.int32), None, 9_000)
    rows.open(1, 5, 1, b"a")
    survivor = reader.survivors()[0]
    assert survivor.row == Row(5, 0, 10, 2, 1, 1, 9, 9, 1)
    rows.open(1, 6, 2, b"b")
    survivor = reader.survivors()[0]
    assert (survivor.note, survivor.row) == (b"b", None)


@given(st.integers(0, 7), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_writer_that_dies_in_a_line_costs_at_most_one_step(words: int, step: int) -> None:
    """The first `words` of the eight stores of one more step arrive, in the writer's order: word 0 last."""
    memory = new_page()
    rows, meter = HostRows(memory), NumpyMeter(memory)
    rows.open(1, 5, 1, b"a")
    meter.begin([Join(1, 5, 10)], 0)
    one, token = np.array([1], np.int32), np.array([[4]], np.int32)
    for n in range(step):
        meter.step(one, token, None, 1000 * (n + 1))
    before = bytes(memory)
    meter.step(one, token, None, 1_000_000)
    rows.count(np.array([1]), np.array([9]), np.array([9]))
    torn = bytearray(before)
    for line in (layout.WORD_ROWS + layout.LINE_WORDS, layout.host_rows_word(SLOTS) + layout.LINE_WORDS):
        for word in list(reversed(range(8)))[:words]:
            at = (line + word) * 8
            torn[at : at + 8] = memory[at : at + 8]
    reader = PageReader(torn)
    if words:
        assert reader.row(1) is None
    survivor = reader.survivors()[0]
    assert survivor.row is not None
    assert survivor.row.computed in (step, step + 1)
    assert survivor.host.delivered in (0, 9)
    # The next writer's first line can be told from the torn one, and is read whole.
    successor = NumpyMeter(torn)
    successor.begin([Join(1, 6, 11)], 0)
    assert reader.row(1) == Row(6, 0, 11, 0, 0, 0, 0, 0, 0)
    host = HostRows(torn)
    host.open(1, 6, 1, b"next")
    assert reader.host_row(1) == HostRow(6, layout.PHASE_OPEN, 0, 0, 1, 0)


def test_words_of_two_generations_are_never_taken_for_one() -> None:
    memory = new_page()
    meter = NumpyMeter(memory)
    meter.begin([Join(1, 5, 10)], 0)
    meter.step(np.array([1], np.int32), np.array([[4]], np.int32), None, 1000)
    HostRows(memory).open(1, 6, 1, b"b")
    before = bytes(memory)
    meter.begin([Join(1, 6, 20)], 0)
    for words in range(8):
        torn = bytearray(before)
        for word in list(reversed(range(8)))[:words]:
            at = (layout.WORD_ROWS + layout.LINE_WORDS + word) * 8
            torn[at : at + 8] = memory[at : at + 8]
        assert PageReader(torn).survivors()[0].row is None


def test_a_torn_note_is_no_note() -> None:
    memory = new_page()
    HostRows(memory).open(1, 5, 1, b"exchange")
    memory[layout.notes_byte(SLOTS) + layout.NOTE_BYTES + 10] ^= 1
    assert PageReader(memory).note(1, 5) is None
    assert PageReader(memory).survivors() == []


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
    rows = HostRows(memory)
    rows.open(3, 2, 1, b"note")
    again, slots = map_page_file(path)
    assert slots == SLOTS
    reader = PageReader(again)
    assert reader.note(3, 2) == b"note"
    reader.close()
    rows.release()
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
from evap.metering.page import HostRows, map_page_file
from evap.metering.writer import Join, NumpyMeter
page, slots = map_page_file(Path(sys.argv[1]))
meter, rows = NumpyMeter(page), HostRows(page)
for slot in range(slots):
    rows.open(slot, 1, 1, b"note %d" % slot)
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
    survivors = reader.survivors()
    assert [s.note for s in survivors] == [b"note %d" % slot for slot in range(SLOTS)]
    counts = {s.row.computed for s in survivors if s.row is not None}
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= reader.heartbeat()
