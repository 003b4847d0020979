"""Rows against a plain model: any mix of streams, windows, joins, leaves and batch shapes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.protocol.rows import RowTable
from tests.fakes import FakeCore, FakeReply
from tests.fakes import frames as payloads

WORDS = ["a", "bc", " the", '"', "\\", "\n", "é", "漢", "😀", "longer words here"]
WIDTH = 40
FIELDS = np.frombuffer(b"".join((json.dumps(w)[1:]).encode().ljust(WIDTH) for w in WORDS), f"V{WIDTH}")
PREFIX = b'data: {"id":"x","choices":[{"index":%2d,"delta":{"content":"'
TAIL = b"}}]}\n\n"


def frames(core: FakeCore) -> list[tuple[int, dict[str, Any], int]]:
    """(stream, event, payload bytes)."""
    return [(stream, json.loads(payload[6:]), len(payload)) for stream, payload in payloads(core)]


def reply(core: FakeCore, stream_id: int, *, buffered: int = 0, alive: bool = True) -> FakeReply:
    it = FakeReply(core, stream_id, window=core.windows.get(stream_id, 65_535))
    it.version, it.started, it.buffered, it.alive = core.version, True, buffered, alive
    return it


def join(table: RowTable, core: FakeCore, slot: int, stream_id: int, index: int = 0) -> bool:
    core.windows.setdefault(stream_id, 65_535)
    return table.join(slot, reply(core, stream_id), PREFIX % index, TAIL, WIDTH)


def push(table: RowTable, records: list[tuple[int, int]], ok: list[bool] | None = None) -> list[bool]:
    slots = np.array([s for s, _ in records], np.int32)
    tokens = np.array([t for _, t in records], np.int32)
    fast = np.array(ok if ok is not None else [True] * len(records), np.bool_)
    return [bool(x) for x in table.push(slots, tokens, (FIELDS,), fast)]


def test_one_step_is_one_append_per_connection() -> None:
    table, cores = RowTable(64), [FakeCore(), FakeCore()]
    for slot in range(20):
        assert join(table, cores[slot % 2], slot, 1 + 2 * slot)
    assert all(push(table, [(slot, slot % len(WORDS)) for slot in range(20)]))
    for core in cores:
        assert len(core.output) == 1
        assert len(frames(core)) == 10


def test_output_is_not_a_live_view() -> None:
    table, core = RowTable(8), FakeCore()
    join(table, core, 3, 7)
    push(table, [(3, 0)])
    before = bytes(core.output[0])
    push(table, [(3, 9)])
    assert bytes(core.output[0]) == before


def test_a_plan_outlives_slots_that_are_on_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come, go and are slow; the rows of the others are not gathered anew for that."""
    table, core = RowTable(16), FakeCore()
    for slot in range(4):
        join(table, core, slot, 1 + 2 * slot)
    made: list[list[int]] = []
    make = table._make

    def spy(slots: Any) -> Any:
        made.append(slots.tolist())
        return make(slots)

    monkeypatch.setattr(table, "_make", spy)
    rows = [(slot, slot) for slot in range(4)]
    for batch in (rows, [*rows, (9, 1)], [(8, 0), *rows, (9, 1)], [*rows[:2], (9, 5), *rows[2:]], rows):
        table.forget(10)
        assert table.delivered(9) == 0
        assert not table.join(11, reply(core, 99, buffered=1), PREFIX % 0, TAIL, WIDTH)
        assert push(table, batch) == [slot < 4 for slot, _ in batch]
    assert made == [[0, 1, 2, 3]]
    assert [table.delivered(slot) for slot in range(4)] == [5] * 4
    assert [f[0] for f in frames(core)] == [1, 3, 5, 7] * 5
    assert push(table, [*rows, (9, 1)], [False, True, True, True, True]) == [False, True, True, True, False]
    assert [table.delivered(slot) for slot in range(4)] == [5, 6, 6, 6]
    table.leave(0)
    assert push(table, rows) == [False, True, True, True]
    assert push(table, rows[1:]) == [True] * 3
    assert len(made) == 3
    core.writable = False
    assert push(table, [(9, 1), *rows[1:]]) == [False] * 4
    assert [table.delivered(slot) for slot in range(4)] == [5, 8, 8, 8]


def test_a_slow_token_takes_the_others_of_its_slot_with_it() -> None:
    table, core = RowTable(8), FakeCore()
    join(table, core, 1, 1)
    join(table, core, 2, 3)
    assert push(table, [(1, 0), (2, 1), (1, 2), (2, 3)], [True, True, False, True]) == [False, True, False, True]
    assert [f[0] for f in frames(core)] == [3, 3]


def test_choices_of_one_stream_share_its_window() -> None:
    table, core = RowTable(8), FakeCore()
    width = len(PREFIX % 0) + WIDTH + len(TAIL)
    core.windows[5] = 3 * width
    for slot in range(2):
        assert join(table, core, slot, 5, slot)
    assert push(table, [(0, 0), (1, 1)]) == [True, True]
    assert push(table, [(0, 0), (1, 1)]) == [False, False], "one frame's worth of window is left for two"
    table.leave(0)
    assert core.windows[5] == 3 * width, "the window stays with the rows while one choice is on them"
    table.leave(1)
    assert core.windows[5] == width


def test_a_connection_without_room_gives_records_back_and_others_go_on() -> None:
    table, full, free = RowTable(8), FakeCore(connection_window=10), FakeCore()
    join(table, full, 0, 1)
    join(table, free, 1, 1)
    assert push(table, [(0, 0), (1, 1)]) == [False, True]
    assert not full.output
    assert len(frames(free)) == 1


def test_a_connection_whose_transport_is_full_gives_records_back() -> None:
    table, core = RowTable(8), FakeCore(writable=False)
    join(table, core, 0, 1)
    assert push(table, [(0, 0)]) == [False]
    assert not core.output


def test_release_takes_all_choices_of_a_stream_off() -> None:
    table, core = RowTable(8), FakeCore()
    for slot in range(3):
        join(table, core, slot, 1 if slot < 2 else 3, slot)
    push(table, [(0, 0), (1, 0), (2, 0)])
    table.release(reply(core, 1))
    assert [slot in table for slot in range(3)] == [False, False, True]
    assert core.taken == {3}
    assert core.windows[1] == 65_535 - sum(f[2] for f in frames(core) if f[0] == 1)


def test_window_frames_see_the_true_window() -> None:
    table, core = RowTable(8), FakeCore()
    join(table, core, 0, 1)
    push(table, [(0, 0)])
    spent = frames(core)[0][2]
    table.before_window_frame(core, 1)
    assert core.windows[1] == 65_535 - spent
    core.windows[1] += 1000
    table.after_window_frame(core, 1)
    assert table.window[0] == 66_535 - spent


def test_a_window_that_was_made_negative_takes_no_rows() -> None:
    """RFC 9113 6.9.2: a lowered SETTINGS_INITIAL_WINDOW_SIZE; the plan of the last step is still there."""
    table, core = RowTable(8), FakeCore()
    join(table, core, 0, 1)
    assert push(table, [(0, 0)]) == [True]
    table.before_window_frame(core, 0)
    core.windows[1] = -500
    table.after_window_frame(core, 0)
    assert push(table, [(0, 0)]) == [False]
    assert core.windows[1] == -500
    assert len(core.output) == 1


def test_join_is_refused_while_bytes_are_buffered() -> None:
    table, core = RowTable(8), FakeCore()
    core.windows[1] = 100
    assert not table.join(0, reply(core, 1, buffered=1), PREFIX % 0, TAIL, WIDTH)
    assert not table.join(0, reply(core, 1, alive=False), PREFIX % 0, TAIL, WIDTH)
    assert 0 not in table


def test_http1_rows_are_chunks() -> None:
    table, core = RowTable(8), FakeCore(version="1.1")
    core.windows[0] = 1 << 40
    assert table.join(0, reply(core, 0), PREFIX % 0, TAIL, WIDTH)
    push(table, [(0, 2)])
    data = bytes(core.output[0])
    size, _, rest = data.partition(b"\r\n")
    assert rest[int(size, 16) :] == b"\r\n"
    assert json.loads(rest[6 : int(size, 16)])["choices"][0]["delta"]["content"] == " the"


def test_more_than_256_formats_is_an_error_not_a_mix_up() -> None:
    table, core = RowTable(2), FakeCore()
    core.windows[1] = 1 << 30
    for n in range(256):
        table.join(0, reply(core, 1), b"x" * (n + 1), TAIL, WIDTH)
        table.leave(0)
    with pytest.raises(RuntimeError):
        table.join(0, reply(core, 1), b"x" * 300, TAIL, WIDTH)


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 11)),
        st.tuples(st.just("leave"), st.integers(0, 11)),
        st.tuples(st.just("window"), st.integers(0, 5), st.integers(1, 400)),
        st.tuples(st.just("connection"), st.integers(0, 1), st.integers(1, 2000)),
        st.tuples(
            st.just("step"),
            st.lists(st.tuples(st.integers(0, 11), st.integers(0, len(WORDS) - 1), st.booleans()), max_size=20),
        ),
        st.tuples(st.just("again"), st.integers(0, len(WORDS) - 1), st.sets(st.integers(0, 11), max_size=3)),
    ),
    max_size=40,
)


class History:
    """12 slots are the choices 0 and 1 of 6 streams on 2 connections."""

    def __init__(self, window: int, connection: int) -> None:
        self.table = RowTable(16)
        self.cores = [FakeCore(connection_window=connection) for _ in range(2)]
        self.granted = dict.fromkeys(range(6), window)
        self.allowed = [connection, connection]
        self.written: dict[int, list[str]] = {slot: [] for slot in range(12)}
        self.last: list[tuple[int, int, bool]] = []
        for stream in range(6):
            self.cores[stream % 2].windows[stream * 2 + 1] = window

    def join(self, slot: int) -> None:
        stream = slot // 2
        if slot not in self.table:
            stream_reply = reply(self.cores[stream % 2], stream * 2 + 1)
            self.table.join(slot, stream_reply, PREFIX % (slot % 2), TAIL, WIDTH)

    def leave(self, slot: int) -> None:
        self.table.leave(slot)

    def window(self, stream: int, more: int) -> None:
        core, sid = self.cores[stream % 2], stream * 2 + 1
        self.table.before_window_frame(core, sid)
        core.windows[sid] += more
        self.granted[stream] += more
        self.table.after_window_frame(core, sid)

    def connection(self, number: int, more: int) -> None:
        self.cores[number].connection_window += more
        self.allowed[number] += more

    def again(self, shift: int, others: set[int]) -> None:
        """The same slots with other tokens, all fast; others that are on no row come or go."""
        records = [(s, (t + shift) % len(WORDS), True) for s, t, _ in self.last if s not in others or s in self.table]
        self.step(records + [(s, shift, True) for s in others if s not in self.table])

    def step(self, records: list[tuple[int, int, bool]]) -> None:
        self.last = records
        if not records:
            return
        done = push(self.table, [(s, t) for s, t, _ in records], [ok for _, _, ok in records])
        for (slot, token, ok), was in zip(records, done, strict=True):
            assert ok or not was
            if was:
                self.written[slot].append(WORDS[token])

    def check(self, number: int) -> None:
        core = self.cores[number]
        assert not core.taken
        got: dict[int, list[str]] = {}
        total: dict[int, int] = {}
        for sid, event, length in frames(core):
            choice = event["choices"][0]
            got.setdefault((sid - 1) // 2 * 2 + choice["index"], []).append(choice["delta"]["content"])
            total[sid] = total.get(sid, 0) + length
        for slot, words in self.written.items():
            assert (slot // 2) % 2 != number or got.get(slot, []) == words
        assert core.connection_window == self.allowed[number] - sum(total.values())
        for sid, left in core.windows.items():
            assert left == self.granted[(sid - 1) // 2] - total.get(sid, 0)


@settings(max_examples=150)
@given(OPS, st.integers(100, 2000), st.integers(100, 4000))
def test_any_history_keeps_order_and_windows(ops: list[tuple[Any, ...]], window: int, connection: int) -> None:
    """Every record is written once, in order, or given back; no window is overdrawn or lost."""
    history = History(window, connection)
    for name, *args in ops:
        getattr(history, name)(*args)
    for slot in range(12):
        history.leave(slot)
    for number in range(2):
        history.check(number)


def test_a_window_that_is_short_for_a_step_is_not_given_to_the_first_format() -> None:
    """Which stream gets what there is, is a matter of urgency, and the outbox knows it: none goes out as a row."""
    table, core, other = RowTable(8), FakeCore(), FakeCore()
    for slot, sid, prefix in ((0, 1, PREFIX % 0), (1, 3, PREFIX % 0), (2, 5, PREFIX % 0 + b" ")):
        core.windows[sid] = 65_535
        assert table.join(slot, reply(core, sid), prefix, TAIL, WIDTH)
    join(table, other, 3, 1)
    charge = len(PREFIX % 0) + WIDTH + len(TAIL)
    core.connection_window = 3 * charge  # one octet less than the step takes
    assert push(table, [(slot, 0) for slot in range(4)]) == [False, False, False, True]
    assert core.output == []
    core.connection_window += 1
    assert all(push(table, [(slot, 0) for slot in range(4)]))
    assert core.connection_window == 0
    assert not any(push(table, [(slot, 0) for slot in range(3)]))
