"""Rows against a plain model: any mix of streams, windows, joins, leaves and batch shapes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.protocol.rows import RowTable

WORDS = ["a", "bc", " the", '"', "\\", "\n", "é", "漢", "😀", "longer words here"]
WIDTH = 40
FIELDS = np.frombuffer(b"".join((json.dumps(w)[1:]).encode().ljust(WIDTH) for w in WORDS), f"V{WIDTH}")
PREFIX = b'data: {"id":"x","choices":[{"index":%2d,"delta":{"content":"'
TAIL = b"}}]}\n\n"


@dataclass
class Core:
    """A wire core that counts windows the way HTTP/2 does."""

    version: str = "2"
    connection_window: int = 1 << 20
    windows: dict[int, int] = field(default_factory=dict)
    output: list[bytes] = field(default_factory=list)
    rows: Any = None

    def stream_window(self, stream_id: int) -> int:
        return self.windows[stream_id]

    def spend(self, stream_id: int, n: int) -> None:
        self.windows[stream_id] -= n
        assert self.windows[stream_id] >= 0

    def spend_connection(self, n: int) -> None:
        self.connection_window -= n
        assert self.connection_window >= 0

    def append_raw(self, data: Any, frames: int) -> None:
        assert len(data) % frames == 0
        self.output.append(data)

    writable: bool = True
    taken: set[int] = field(default_factory=set)

    def acquire(self, reply: Any) -> int | None:
        if not reply.alive or reply.buffered:
            return None
        self.taken.add(reply.stream_id)
        return self.windows[reply.stream_id]

    def on_rows(self, stream_id: int, on: bool) -> None:
        assert not on
        self.taken.remove(stream_id)


@dataclass
class Reply:
    core: Core
    stream_id: int
    alive: bool = True
    buffered: int = 0
    owner: object = None

    @property
    def version(self) -> str:
        return self.core.version

    def start(self, status: int, headers: Any) -> None: ...
    def send(self, data: bytes) -> None: ...
    def end(self, trailers: Any = ()) -> None: ...
    def whole(self, status: int, headers: Any, body: bytes) -> None: ...
    def abort(self) -> None: ...
    def refuse(self) -> None: ...


def frames(core: Core) -> list[tuple[int, dict[str, Any], int]]:
    """(stream, event, payload bytes) of everything a core was given, parsed by the rules of RFC 9113 4.1."""
    data, out = b"".join(bytes(p) for p in core.output), []
    while data:
        length = int.from_bytes(data[:3], "big")
        assert data[3] == 0
        assert data[4] == 0, "a row never ends a stream"
        payload = data[9 : 9 + length]
        assert len(payload) == length
        assert payload.startswith(b"data: ")
        assert payload.endswith(b"\n\n")
        out.append((int.from_bytes(data[5:9], "big"), json.loads(payload[6:]), length))
        data = data[9 + length :]
    return out


def join(table: RowTable, core: Core, slot: int, stream_id: int, index: int = 0) -> bool:
    core.windows.setdefault(stream_id, 65_535)
    return table.join(slot, Reply(core, stream_id), PREFIX % index, TAIL, WIDTH)


def push(table: RowTable, records: list[tuple[int, int]], ok: list[bool] | None = None) -> list[bool]:
    slots = np.array([s for s, _ in records], np.int32)
    tokens = np.array([t for _, t in records], np.int32)
    fast = np.array(ok if ok is not None else [True] * len(records), np.bool_)
    return [bool(x) for x in table.push(slots, FIELDS[tokens], fast)]


def test_one_step_is_one_append_per_connection() -> None:
    table, cores = RowTable(64), [Core(), Core()]
    for slot in range(20):
        assert join(table, cores[slot % 2], slot, 1 + 2 * slot)
    assert all(push(table, [(slot, slot % len(WORDS)) for slot in range(20)]))
    for core in cores:
        assert len(core.output) == 1
        assert len(frames(core)) == 10


def test_output_is_not_a_live_view() -> None:
    table, core = RowTable(8), Core()
    join(table, core, 3, 7)
    push(table, [(3, 0)])
    before = bytes(core.output[0])
    push(table, [(3, 9)])
    assert bytes(core.output[0]) == before


def test_a_slow_token_takes_the_others_of_its_slot_with_it() -> None:
    table, core = RowTable(8), Core()
    join(table, core, 1, 1)
    join(table, core, 2, 3)
    assert push(table, [(1, 0), (2, 1), (1, 2), (2, 3)], [True, True, False, True]) == [False, True, False, True]
    assert [f[0] for f in frames(core)] == [3, 3]


def test_choices_of_one_stream_share_its_window() -> None:
    table, core = RowTable(8), Core()
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
    table, full, free = RowTable(8), Core(connection_window=10), Core()
    join(table, full, 0, 1)
    join(table, free, 1, 1)
    assert push(table, [(0, 0), (1, 1)]) == [False, True]
    assert not full.output
    assert len(frames(free)) == 1


def test_a_connection_whose_transport_is_full_gives_records_back() -> None:
    table, core = RowTable(8), Core(writable=False)
    join(table, core, 0, 1)
    assert push(table, [(0, 0)]) == [False]
    assert not core.output


def test_release_takes_all_choices_of_a_stream_off() -> None:
    table, core = RowTable(8), Core()
    for slot in range(3):
        join(table, core, slot, 1 if slot < 2 else 3, slot)
    push(table, [(0, 0), (1, 0), (2, 0)])
    table.release(Reply(core, 1))
    assert [slot in table for slot in range(3)] == [False, False, True]
    assert core.taken == {3}
    assert core.windows[1] == 65_535 - sum(f[2] for f in frames(core) if f[0] == 1)


def test_window_frames_see_the_true_window() -> None:
    table, core = RowTable(8), Core()
    join(table, core, 0, 1)
    push(table, [(0, 0)])
    spent = frames(core)[0][2]
    table.before_window_frame(core, 1)
    assert core.windows[1] == 65_535 - spent
    core.windows[1] += 1000
    table.after_window_frame(core, 1)
    assert table.window[0] == 66_535 - spent


def test_join_is_refused_while_bytes_are_buffered() -> None:
    table, core = RowTable(8), Core()
    core.windows[1] = 100
    assert not table.join(0, Reply(core, 1, buffered=1), PREFIX % 0, TAIL, WIDTH)
    assert not table.join(0, Reply(core, 1, alive=False), PREFIX % 0, TAIL, WIDTH)
    assert 0 not in table


def test_http1_rows_are_chunks() -> None:
    table, core = RowTable(8), Core(version="1.1")
    core.windows[0] = 1 << 40
    assert table.join(0, Reply(core, 0), PREFIX % 0, TAIL, WIDTH)
    push(table, [(0, 2)])
    data = bytes(core.output[0])
    size, _, rest = data.partition(b"\r\n")
    assert rest[int(size, 16) :] == b"\r\n"
    assert json.loads(rest[6 : int(size, 16)])["choices"][0]["delta"]["content"] == " the"


def test_more_than_256_formats_is_an_error_not_a_mix_up() -> None:
    table, core = RowTable(2), Core()
    core.windows[1] = 1 << 30
    with pytest.raises(RuntimeError):
        for n in range(300):
            table.join(0, Reply(core, 1), b"x" * (n + 1), TAIL, WIDTH)
            table.leave(0)


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
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(OPS, st.integers(100, 2000), st.integers(100, 4000))
def test_any_history_keeps_order_and_windows(ops: list[tuple[Any, ...]], window: int, connection: int) -> None:
    """12 slots are the choices 0 and 1 of 6 streams on 2 connections. Every record is written once, in order, or given
    back; no window is ever overdrawn (the fake core asserts) and none is lost."""
    table = RowTable(16)
    cores = [Core(connection_window=connection) for _ in range(2)]
    granted = dict.fromkeys(range(6), window)
    allowed = [connection, connection]
    for stream in range(6):
        cores[stream % 2].windows[stream * 2 + 1] = window
    written: dict[int, list[str]] = {slot: [] for slot in range(12)}
    for op in ops:
        if op[0] == "join" and op[1] not in table:
            stream = op[1] // 2
            table.join(op[1], Reply(cores[stream % 2], stream * 2 + 1), PREFIX % (op[1] % 2), TAIL, WIDTH)
        elif op[0] == "leave":
            table.leave(op[1])
        elif op[0] == "window":
            core, sid = cores[op[1] % 2], op[1] * 2 + 1
            table.before_window_frame(core, sid)
            core.windows[sid] += op[2]
            granted[op[1]] += op[2]
            table.after_window_frame(core, sid)
        elif op[0] == "connection":
            cores[op[1]].connection_window += op[2]
            allowed[op[1]] += op[2]
        elif op[0] == "step" and op[1]:
            done = push(table, [(s, t) for s, t, _ in op[1]], [ok for _, _, ok in op[1]])
            for (slot, token, ok), was in zip(op[1], done, strict=True):
                assert not (was and not ok)
                if was:
                    written[slot].append(WORDS[token])
    for slot in range(12):
        table.leave(slot)
    for number, core in enumerate(cores):
        assert not core.taken
        got: dict[int, list[str]] = {}
        total: dict[int, int] = {}
        for sid, event, length in frames(core):
            choice = event["choices"][0]
            got.setdefault((sid - 1) // 2 * 2 + choice["index"], []).append(choice["delta"]["content"])
            total[sid] = total.get(sid, 0) + length
        for slot, words in written.items():
            if (slot // 2) % 2 == number:
                assert got.get(slot, []) == words
        assert core.connection_window == allowed[number] - sum(total.values())
        for sid, left in core.windows.items():
            assert left == granted[(sid - 1) // 2] - total.get(sid, 0)
