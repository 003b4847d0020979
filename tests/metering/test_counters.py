"""The engines' pages, joined: whose row it is, what must agree, and what a killed server's engines leave."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evap.messages import Finish
from evap.metering import counters, layout
from evap.metering.counters import Counted, Counters, Left
from evap.metering.page import map_page_file
from evap.metering.writer import Join, NumpyMeter

SLOTS = 4
START_NS, UNIX_NS = 5_000_000_000, 1_700_000_000_000_000_000


class Engine:
    """Another process's end: it finds the page by what it is told."""

    def __init__(self, spec: dict[str, str]) -> None:
        with Path(spec["page"]).open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        self.meter = NumpyMeter(self.memory)
        self.now_ns = START_NS

    def run(self, slot: int, generation: int, tokens: int) -> None:
        self.meter.begin([Join(slot, generation, 10, 3)], self.now_ns)
        for _ in range(tokens):
            self.now_ns += 1_000_000
            self.meter.step(np.array([slot], np.int32), np.array([[7]], np.int32), None, self.now_ns, ring=False)


def make(folder: Path | None = None, *, engines: int = 1, ahead: bool = False) -> Counters:
    return Counters(SLOTS, engines, folder, ahead=ahead, now_ns=START_NS, unix_ns=UNIX_NS)


@pytest.fixture(params=[True, False], ids=["file", "memory"])
def pages(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Counters]:
    it = make(tmp_path if request.param else None)
    yield it
    it.close()


def test_a_row_is_of_one_generation(pages: Counters) -> None:
    engine = Engine(pages.specs[0])
    assert pages.row(2, 0) is None
    assert pages.progress == 0
    engine.run(2, 9, 5)
    assert pages.progress == 5
    assert pages.row(2, 8) is None
    row = pages.row(2, 9)
    assert row is not None
    assert (row.computed, row.prompt, row.cached) == (5, 10, 3)


def test_what_agrees_is_the_account(pages: Counters) -> None:
    Engine(pages.specs[0]).run(1, 3, 4)
    assert pages.final(1, 3, 4, Finish.LENGTH) == Counted(4, 4, START_NS + 1_000_000, START_NS + 4_000_000)
    assert pages.mismatches == 0


@pytest.mark.parametrize(
    ("given", "finish", "ahead", "wrong"),
    [(4, Finish.STOP, False, 0), (5, Finish.STOP, False, 1), (3, Finish.LENGTH, False, 1),
     (3, Finish.CANCELLED, False, 1), (3, Finish.ERROR, False, 0), (5, Finish.ERROR, False, 1),
     (3, Finish.STOP, True, 0), (5, Finish.STOP, True, 1)],
)  # fmt: skip
def test_what_does_not_agree_is_said(
    given: int, finish: Finish, ahead: bool, wrong: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that died, or that runs ahead, may have sampled more than came; nobody gives more than was sampled."""
    pages = make(ahead=ahead)
    Engine(pages.specs[0]).run(0, 0, 4)
    counted = pages.final(0, 0, given, finish)
    assert counted is not None
    assert counted.computed == max(4, given)
    pages.look_again()
    assert pages.mismatches == wrong
    assert ("the engine counts 4 tokens" in caplog.text) == bool(wrong)
    pages.close()


def test_an_engine_that_does_not_meter_is_not_blamed(pages: Counters) -> None:
    assert pages.final(0, 0, 7, Finish.LENGTH) is None
    assert pages.mismatches == 0
    Engine(pages.specs[0]).run(1, 0, 1)
    assert pages.final(0, 0, 7, Finish.LENGTH) is None
    assert pages.mismatches == 1, "but one that does is"
    assert pages.final(0, 1, 0, Finish.CANCELLED) is None, "cancelled before it ran"
    assert pages.mismatches == 1


def test_a_worker_that_counts_late_is_not_blamed(tmp_path: Path) -> None:
    """vLLM's counts beside the way of the tokens."""
    pages = make(tmp_path, ahead=True)
    engine = Engine(pages.specs[0])
    engine.run(1, 3, 4)
    assert pages.final(1, 3, 5, Finish.LENGTH) is not None
    engine.meter.step(np.array([1], np.int32), np.array([[7]], np.int32), None, engine.now_ns, ring=False)
    pages.look_again()
    assert pages.final(1, 3, 6, Finish.LENGTH) is not None
    engine.run(1, 4, 1)  # the slot has a new user
    pages.look_again()
    assert pages.mismatches == 0
    pages.close()


def test_each_engine_has_a_page(tmp_path: Path) -> None:
    pages = make(tmp_path, engines=2)
    for number, spec in enumerate(pages.specs):
        Engine(spec).run(3, number, number + 1)
    rows = [pages.row(3, generation) for generation in (0, 1)]
    assert [row.computed for row in rows if row] == [1, 2]
    assert pages.progress == 3
    pages.close()


def test_what_is_left(tmp_path: Path) -> None:
    pages = make(tmp_path)
    engine = Engine(pages.specs[0])
    engine.run(2, 5, 3)
    pages.close()
    left = Left(tmp_path)
    row = left.row(2, 5)
    assert row is not None
    assert (row.computed, row.steps) == (3, 3)
    assert (row.first_us, row.last_us) == (UNIX_NS // 1000 + 1000, UNIX_NS // 1000 + 3000), "since 1970"
    assert left.row(2, 4) is None
    assert left.row(1, 5) is None
    left.close()
    make(tmp_path).close()
    fresh = Left(tmp_path)
    engine.run(2, 6, 1)  # an engine that has outlived its server writes where nobody looks
    assert fresh.row(2, 6) is None
    fresh.close()


def test_a_row_in_which_the_engine_was_killed_still_counts(tmp_path: Path) -> None:
    """Word 0 is written last: what is there of the new line is newer counts, and never another generation's."""
    pages = make(tmp_path)
    Engine(pages.specs[0]).run(1, 5, 3)
    pages.close()
    memory, _ = map_page_file(tmp_path / "counters-0")
    words = np.frombuffer(memory, "<u8")
    at = layout.WORD_ROWS + layout.LINE_WORDS + layout.ROW_FIELDS.index("computed")
    words[at] = int(words[at]) + (1 << layout.VALUE_BITS) + 1  # the fourth step's count, with the next tag
    del words
    memory.close()
    left = Left(tmp_path)
    row = left.row(1, 5)
    assert row is not None
    assert row.computed == 4
    left.close()


def test_beside_a_gpu_the_page_is_in_memory_that_can_be_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, shm = tmp_path / "data", tmp_path / "shm"
    folder.mkdir()
    shm.mkdir()
    make(folder).close()
    monkeypatch.setattr(counters, "GPU", tmp_path)
    monkeypatch.setattr(counters, "SHM", shm)
    pages = make(folder)
    assert not list(folder.iterdir()), "the one of a start without a GPU is gone"
    assert shm in Path(pages.specs[0]["page"]).parents
    Engine(pages.specs[0]).run(1, 3, 2)
    pages.close()
    left = Left(folder)
    assert left.row(1, 3) is not None
    left.close()
    other = tmp_path / "other"
    other.mkdir()
    stranger = Left(other)
    assert stranger.row(1, 3) is None
    stranger.close()


def test_files_that_are_no_pages_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "counters-0").write_bytes(b"not a page" * 1000)
    (tmp_path / "counters-1").write_bytes(b"")
    left = Left(tmp_path)
    assert left.row(0, 0) is None
    assert caplog.text.count("no counters page") == 2
    left.close()
