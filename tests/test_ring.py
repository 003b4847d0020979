"""The token ring under every order of stores, a slow reader, a lapped reader, and writers that die."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evap import ring
from evap.messages import TokenBatch
from evap.ring import RingReader, RingWriter, format_ring, ring_bytes, tag_of

Record = tuple[int, int, int, int, int]


def record(position: int) -> Record:
    """A record that can only stem from this position."""
    token = position * 2654435761 % (1 << 32) - (1 << 31)
    return position % 65536, position * 7 % 65536, token, position % (1 << 31), position % 256


def write(writer: RingWriter, count: int) -> None:
    rows = [record(writer.position + i) for i in range(count)]
    slot, generation, token, index, flags = ([row[k] for row in rows] for k in range(5))
    writer.write(slot, generation, token, index, flags, writer.position % (1 << 20))


def rows(batch: TokenBatch) -> list[Record]:
    columns = (batch.slot, batch.generation, batch.token, batch.index, batch.flags)
    return list(zip(*(c.tolist() for c in columns), strict=True))


def pair(capacity: int, position: int = 0) -> tuple[RingWriter, RingReader]:
    memory = bytearray(ring_bytes(capacity))
    format_ring(memory, capacity, position)
    return RingWriter(memory, capacity), RingReader(memory, capacity)


def test_a_batch_comes_back_with_the_promised_dtypes() -> None:
    writer, reader = pair(8)
    assert reader.poll() is None
    writer.write([1, 65535], [0, 65535], [-1, 2**31 - 1], [0, 2**31 - 1], [0, 255], 2**24 + 5)
    batch = reader.poll()
    assert batch is not None
    assert rows(batch) == [(1, 0, -1, 0, 0), (65535, 65535, 2**31 - 1, 2**31 - 1, 255)]
    assert [a.dtype for a in (batch.slot, batch.generation, batch.token, batch.index)] == [np.int32] * 4
    assert batch.flags.dtype == np.uint8
    assert batch.step == 5
    assert reader.poll() is None
    assert reader.lost == 0


def test_numpy_arrays_of_any_integer_dtype_are_taken() -> None:
    writer, reader = pair(4)
    one = [np.array([v], d) for v, d in ((3, "i4"), (4, "u2"), (-7, "i8"), (9, "i4"), (0x81, "u1"))]
    writer.write(one[0], one[1], one[2], one[3], one[4], 1)
    batch = reader.poll()
    assert batch is not None
    assert rows(batch) == [(3, 4, -7, 9, 0x81)]


def test_a_limit_leaves_the_rest_for_the_next_poll() -> None:
    writer, reader = pair(8)
    write(writer, 5)
    seen = [reader.poll(2), reader.poll(2), reader.poll(2)]
    assert [len(b) for b in seen if b is not None] == [2, 2, 1]


def test_room_counts_what_the_reader_has_taken() -> None:
    writer, reader = pair(4)
    assert writer.room() == 4
    write(writer, 3)
    assert writer.room() == 1
    reader.poll(2)
    assert writer.room() == 3
    write(writer, 9)
    assert writer.room() == 0


def test_the_share_of_the_cache_stands_in_the_header() -> None:
    memory = bytearray(ring_bytes(4))
    writer, reader = RingWriter(memory, 4), RingReader(memory, 4)
    assert reader.kv_usage == 0
    for share in (0.25, 1.0, 0.0):
        writer.tell_kv_usage(share)
        assert reader.kv_usage == share
    writer.write([1], [2], [3], [4], [5], 6)
    assert reader.poll() is not None


def test_a_lapped_reader_counts_what_it_lost() -> None:
    writer, reader = pair(4)
    write(writer, 11)
    batch = reader.poll()
    assert batch is not None
    assert rows(batch) == [record(p) for p in range(7, 11)]
    assert reader.lost == 7


@pytest.mark.parametrize("position", [ring.TAG_CYCLE - 3, (1 << 32) - 3, ring.TAG_CYCLE * 5 - 3, (1 << 48) + 1])
@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_tags_wrap_without_a_seam(position: int, capacity: int) -> None:
    writer, reader = pair(capacity, position)
    for _ in range(12):
        assert reader.poll() is None
        write(writer, 1)
        batch = reader.poll()
        assert batch is not None
        assert rows(batch) == [record(writer.position - 1)]
    assert reader.lost == 0
    write(writer, 3 * capacity)
    batch = reader.poll()
    assert batch is not None
    assert len(batch) == capacity
    assert reader.lost == 2 * capacity


def test_empty_memory_holds_no_record_at_any_position() -> None:
    for position in (ring.TAG_CYCLE - 1, ring.TAG_CYCLE, (1 << 32) - 1, 1 << 32):
        assert tag_of(position) != 0
        _, reader = pair(4, position)
        assert reader.poll() is None


@pytest.mark.parametrize("end", [RingWriter, RingReader])
def test_foreign_memory_is_refused(end: type[RingWriter] | type[RingReader]) -> None:
    good = bytearray(ring_bytes(4))
    format_ring(good, 4)
    for offset, message in ((0, "not a token ring"), (8, "of 5 records"), (12, "of version")):
        bad = bytearray(good)
        bad[offset] ^= 1
        with pytest.raises(ValueError, match=message):
            end(bad, 4)
    for memory, capacity in ((good, 5), (bytes(good), 4), (good, 0), (good, ring.MAX_CAPACITY + 1)):
        with pytest.raises(ValueError, match="ring"):
            end(memory, capacity)
    with pytest.raises(ValueError, match="aligned"):
        end(memoryview(bytearray(ring_bytes(4) + 8))[1:], 4)


def test_close_lets_go_of_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    path.write_bytes(bytes(ring_bytes(4)))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    writer, reader = RingWriter(memory, 4), RingReader(memory, 4)
    write(writer, 2)
    assert reader.poll() is not None
    writer.close()
    reader.close()
    memory.close()  # BufferError if a view were left


class RingMachine(RuleBasedStateMachine):
    """Stores become visible one word at a time; the reader looks between any two of them; the writer dies at will.

    The real writer runs on a shadow copy; the words it changed are the stores, applied in program order (words in
    column order as `write` makes them, head last), or in any order as on a machine without store order.
    """

    @initialize(
        capacity=st.integers(1, 9),
        position=st.sampled_from([0, 1, ring.TAG_CYCLE - 5, (1 << 32) - 2]),
        ordered=st.booleans(),
    )
    def start(self, capacity: int, position: int, ordered: bool) -> None:
        self.capacity, self.ordered = capacity, ordered
        self.memory, self.shadow = bytearray(ring_bytes(capacity)), bytearray(ring_bytes(capacity))
        for memory in (self.memory, self.shadow):
            format_ring(memory, capacity, position)
        self.writer, self.reader = RingWriter(self.shadow, capacity), RingReader(self.memory, capacity)
        self.visible = np.frombuffer(self.memory, "<u8")
        self.stores: list[tuple[int, int]] = []
        self.expected, self.seen, self.first = position, 0, position

    def _write(self, count: int) -> None:
        shadow = np.frombuffer(self.shadow, "<u8")
        before = shadow.copy()
        first = self.writer.position
        write(self.writer, count)
        changed = [int(w) for w in np.flatnonzero(before != shadow)]

        def program_order(word: int) -> tuple[int, int]:
            if word < ring.WORD_RECORDS:
                return 4, 0  # the head
            place, column = divmod(word - ring.WORD_RECORDS, 4)
            return column, (place - first) % self.capacity

        self.stores += [(word, int(shadow[word])) for word in sorted(changed, key=program_order)]

    @rule(count=st.integers(0, 20))
    def produce(self, count: int) -> None:
        self._write(count)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), count=st.integers(1, 30))
    def stores_arrive(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.stores))):
            at = 0
            if not self.ordered:
                at = data.draw(st.integers(0, len(self.stores) - 1))
                word = self.stores[at][0]
                at = next(i for i, store in enumerate(self.stores) if store[0] == word)  # same address: in order
            word, value = self.stores.pop(at)
            self.visible[word] = value

    @rule(limit=st.sampled_from([1, 2, 1000]))
    def consume(self, limit: int) -> None:
        lost = self.reader.lost
        batch = self.reader.poll(limit)
        self.expected += self.reader.lost - lost
        if batch is not None:
            assert 0 < len(batch) <= limit
            assert rows(batch) == [record(self.expected + i) for i in range(len(batch))]
            self.expected += len(batch)
            self.seen += len(batch)

    @precondition(lambda self: self.ordered)
    @rule()
    def writer_dies_and_a_new_one_starts(self) -> None:
        self.stores.clear()
        RingWriter(self.memory, self.capacity)
        self.shadow[:] = self.memory
        self.writer = RingWriter(self.shadow, self.capacity)
        assert self.writer.position >= self.expected

    @rule()
    def drain(self) -> None:
        for word, value in self.stores:
            self.visible[word] = value
        self.stores.clear()
        for _ in range(50):
            self.consume(1000)
        if self.expected != self.writer.position:  # a torn old lap may hide behind a wipe; the next lap shows it
            assert self.ordered
            self._write(2 * self.capacity)
            self.drain()
        assert self.seen + self.reader.lost == self.writer.position - self.first

    @invariant()
    def nothing_is_seen_before_it_is_written(self) -> None:
        if hasattr(self, "reader"):
            assert self.reader.position <= self.writer.position
            assert self.reader.position == self.expected
            assert self.first + self.seen + self.reader.lost == self.reader.position


RingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRingMachine = RingMachine.TestCase


@pytest.mark.parametrize("words_written", range(13))
def test_the_next_writer_continues_behind_the_last_whole_record(words_written: int) -> None:
    capacity = 8
    memory = bytearray(ring_bytes(capacity))
    writer, reader = RingWriter(memory, capacity), RingReader(memory, capacity)
    write(writer, 6)
    assert reader.poll() is not None
    shadow = bytearray(memory)
    write(RingWriter(shadow, capacity), 3)  # dies after some of these twelve words, before the head
    order = [(column, place) for column in range(4) for place in (6, 7, 0)]
    for column, place in order[:words_written]:
        at = ring.HEADER_BYTES + ring.RECORD_BYTES * place + 8 * column
        memory[at : at + 8] = shadow[at : at + 8]
    successor = RingWriter(memory, capacity)
    assert successor.position == 6 + max(0, words_written - 9)
    write(successor, 4)
    got: list[Record] = []
    while (batch := reader.poll()) is not None:
        got += rows(batch)
    assert got == [record(p) for p in range(6, successor.position)]
    assert reader.lost == 0


@given(st.lists(st.integers(0, 12), max_size=20), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_a_writer_that_asks_for_room_loses_nothing(counts: list[int], capacity: int) -> None:
    writer, reader = pair(capacity)
    got: list[Record] = []
    for count in counts:
        write(writer, min(count, writer.room()))
        if count % 3:
            batch = reader.poll()
            got += rows(batch) if batch is not None else []
    while (batch := reader.poll()) is not None:
        got += rows(batch)
    assert got == [record(p) for p in range(writer.position)]
    assert reader.lost == 0


PRODUCER = """
import mmap, sys, time
from evap.ring import RingWriter
from tests.test_ring import write
path, capacity, total, polite = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "polite"
with open(path, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
writer = RingWriter(memory, capacity)
while writer.position < total:
    count = min(1 + writer.position % 13, total - writer.position)
    if polite and writer.room() < count:
        time.sleep(0)  # the reader may need this core
        continue
    write(writer, count)
"""


@pytest.mark.parametrize("mood", ["polite", "rude"])
def test_two_processes(tmp_path: Path, mood: str) -> None:
    capacity, total = 64, 5_000
    path = tmp_path / "ring"
    path.write_bytes(bytes(ring_bytes(capacity)))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    reader = RingReader(memory, capacity)
    command = [sys.executable, "-c", PRODUCER, str(path), str(capacity), str(total), mood]
    seen = 0
    with subprocess.Popen(command) as producer:
        while reader.position < total:
            at, lost = reader.position, reader.lost
            batch = reader.poll()
            if batch is None:
                assert producer.poll() in (None, 0)
                time.sleep(0)
                continue
            first = at + reader.lost - lost
            assert rows(batch) == [record(first + i) for i in range(len(batch))]
            seen += len(batch)
    assert producer.returncode == 0
    assert seen + reader.lost == total
    if mood == "polite":
        assert reader.lost == 0
