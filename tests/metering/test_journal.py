"""The journal against a list: whatever is appended and freed, what a dead process left is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.metering.journal import Journal, recover


@settings(max_examples=150)
@given(st.lists(st.one_of(st.binary(min_size=1, max_size=900), st.integers(1, 5)), max_size=60))
def test_it_is_a_bounded_queue(tmp_path_factory: pytest.TempPathFactory, steps: list[bytes | int]) -> None:
    path = tmp_path_factory.mktemp("j") / "journal"
    journal, queue = Journal(path, 4096), list[tuple[bytes, int]]()
    for step in steps:
        if isinstance(step, bytes):
            position = journal.append(step)
            if position >= 0:
                queue.append((step, position))
            else:
                assert queue, "an empty journal takes anything that fits"
        else:
            for _ in range(min(step, len(queue))):
                journal.free(queue.pop(0)[1])
        assert recover(path) == [payload for payload, _ in queue]
        assert 0 <= journal.used <= journal.size
    journal.close()


def test_it_never_grows_and_wraps_for_ever(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", 4096)
    size = (tmp_path / "j").stat().st_size
    for number in range(5000):
        position = journal.append(b"x" * (number % 300 + 1))
        assert position > 0
        journal.free(position)
    assert recover(tmp_path / "j") == []
    assert (tmp_path / "j").stat().st_size == size


def test_a_record_that_was_being_written_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, 4096)
    journal.append(b"first")
    second = journal.append(b"second")
    data = bytearray(path.read_bytes())
    data[64 + second - 8] ^= 1  # a byte of the second payload
    path.write_bytes(data)
    assert recover(path) == [b"first"]


def test_what_is_no_journal_holds_nothing(tmp_path: Path) -> None:
    assert recover(tmp_path / "absent") == []
    (tmp_path / "other").write_bytes(b"x" * 10_000)
    assert recover(tmp_path / "other") == []
    (tmp_path / "short").write_bytes(b"")
    assert recover(tmp_path / "short") == []
    with pytest.raises(ValueError, match="multiple of 8"):
        Journal(tmp_path / "j", 100)


def test_a_new_journal_is_empty_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path, 4096).append(b"old")
    Journal(path, 8192)
    assert recover(path) == []
