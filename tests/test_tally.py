"""Counters that outlive their process: whoever maps them reads the same numbers, whenever it was killed."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from evap import tally
from evap.histogram import FOLD, Histogram
from evap.messages import Usage
from evap.metering.shared_accounts import make_memory
from evap.metrics import LIMITS, WIRE, Metrics, Settled, left_in
from evap.tally import SIZE, Plain, Tally
from tests.support import ROOT, STOP_TIMEOUT_S


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    fd = make_memory("evap-tally", SIZE)
    yield mmap.mmap(fd, SIZE)
    os.close(fd)


def test_counts_are_dictionaries_that_another_one_reads(memory: mmap.mmap) -> None:
    own = Tally(memory).counts("limits", ("a", "b"))
    other = Tally(memory).counts("ends")
    own["a"] += 3
    own["new"] = own.get("new", 0) + 1
    other["a"] = 7
    assert Tally(memory).counts("limits") == {"a": 3, "b": 0, "new": 1}
    assert Tally(memory).counts("ends") == {"a": 7}
    assert Plain().counts("limits", ("a",)) == {"a": 0}


def test_what_there_is_no_room_for_is_counted_all_the_same(memory: mmap.mmap) -> None:
    own = Tally(memory).counts("x")
    for n in range(2 * tally._MAX):
        own[str(n)] = n
    own["n" * 200] = 1
    own["n" * 200] += 1
    assert len(own) == 2 * tally._MAX + 1
    assert own["n" * 200] == 2
    found = Tally(memory).counts("x")
    assert found == {str(n): n for n in range(tally._MAX)}
    shape = Tally(memory).histogram((1.0,))
    assert shape.counts.tolist() == [0, 0], "histograms are elsewhere"


@pytest.mark.parametrize("many", [0, 1, FOLD - 1, FOLD, FOLD + 1, 3 * FOLD + 5])
def test_a_histogram_is_the_same_with_memory(memory: mmap.mmap, many: int) -> None:
    bounds = (0.1, 0.5, 1.0)
    plain, shared = Histogram(bounds), Tally(memory).histogram(bounds)
    for value in np.random.default_rng(many).uniform(0, 2, many).tolist():
        plain.observe(value)
        shared.observe(value)
    values, weights = np.array([0.3, 9.0]), np.array([2, 5])
    for it in (plain, shared):
        it.add(values, weights)
        it.observe(0.7)
    read = Tally(memory).histogram(bounds)
    for it in (plain, shared, read):
        it.fold()
        it.fold()
    assert plain.counts.tolist() == shared.counts.tolist() == read.counts.tolist()
    assert plain.total == pytest.approx(shared.total) == pytest.approx(read.total)


def settled(end: str = "stop") -> Settled:
    usage = Usage(prompt=10, cached=4, computed=7, emitted=6, delivered=5)
    return Settled(200, end, usage, ("stop",), (6,), queue_s=0.001, prefill_s=0.1, decode_s=0.5, whole_s=0.7)


def test_what_a_process_leaves_is_what_it_would_have_said(memory: mmap.mmap) -> None:
    numbers = Tally(memory)
    it = Metrics("m", 4, numbers)
    it.limits += [numbers.counts(family, ("deadline",)) for family in LIMITS]
    numbers.counts(WIRE, ("violations",))["violations"] += 2
    for limits in it.limits:
        limits["deadline"] += 1  # type: ignore[index]
    for end in ("stop", "length", "client_reset", "made up"):
        it.settled(settled(end))
        it.live.started(10, 4, 0.1)
    it.answered(404)
    it.live.counts["generated"] += 28
    left = left_in(Tally(memory))
    said = it.snapshot()
    assert left.histograms == said.histograms
    assert left.values == said.values | {"evap_violations": {"": 2.0}}
    assert left.values["evap_limit"] == {"deadline": 2}
    assert sum(left.values["evap_exchanges"].values()) == 4


def test_nothing_is_left_of_one_that_never_began(memory: mmap.mmap) -> None:
    left = left_in(Tally(memory))
    assert not any(value for values in left.values.values() for value in values.values())
    assert not any(sum(counts) for counts, _ in left.histograms.values())


CHILD = """
import mmap, os, sys
from evap.tally import SIZE, Tally
tally = Tally(mmap.mmap(int(sys.argv[1]), SIZE))
shape, counts = tally.histogram((0.5,)), tally.counts("n", ("n",))
while True:
    shape.observe(1.0)
    counts["n"] += 1
    if counts["n"] == 1:
        os.write(1, b".")
"""


@pytest.mark.parametrize("moment", range(8))
def test_a_kill_loses_nothing_and_counts_nothing_twice(moment: int) -> None:
    fd = make_memory("evap-tally", SIZE)
    try:
        command = [sys.executable, "-c", CHILD, str(fd)]
        with subprocess.Popen(command, pass_fds=[fd], cwd=ROOT, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.read(1)
            many = Tally(mmap.mmap(fd, SIZE)).counts("n")["n"]
            while Tally(mmap.mmap(fd, SIZE)).counts("n")["n"] < many + 1500 * moment:
                pass
            child.send_signal(signal.SIGKILL)
            child.wait(STOP_TIMEOUT_S)
        found = Tally(mmap.mmap(fd, SIZE))
        shape = found.histogram((0.5,))
        shape.fold()
        counted = found.counts("n")["n"]
        assert shape.counts[1] - counted in (0, 1), "it was between the two stores"
        assert shape.total == shape.counts[1]
    finally:
        os.close(fd)
