"""Writers of the engine's rows: the kernels' host build, and numpy with the same results where there is no compiler.

Both take what the kernels take, from an engine that samples in batches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from evap.messages import SILENT, Finish
from evap.metering import layout
from evap.metering.page import page_slots
from evap.ring import RECORD_WORDS, STEP_MASK, TAG_CYCLE, WORD_HEAD, WORD_RECORDS, RingWriter, ring_bytes

Ints: TypeAlias = npt.NDArray[np.int32]
_VALUE_BITS: Final = np.uint64(layout.VALUE_BITS)


class Join(NamedTuple):
    """A generation that takes a slot, as layout.JOIN_FIELDS. limit: most tokens emitted; eos: the end token or -1."""

    slot: int
    generation: int
    prompt: int
    cached: int = 0
    limit: int = 0xFFFF_FFFF
    eos: int = -1


class MeterWriter(Protocol):
    """What an engine calls around its forward pass. `now_ns` is the clock of the page's epoch."""

    def begin(self, joins: Sequence[Join], now_ns: int) -> None:
        """Before the forward: new generations (a slot at most once), and the start of the step."""
        ...

    def step(self, slots: Ints, tokens: Ints, counts: Ints | None, now_ns: int, *, ring: bool = True) -> None:
        """After the sampler. slots: (rows,), -1 for a row that is not to be counted; no slot twice.

        tokens: (rows, width).
        counts: tokens kept per row, None for one each; 0 for a partial prefill. ring False: count, publish no records.
        Raises ValueError when the ring has fewer than rows * width places.
        """
        ...


class MeterState:
    """Slot and Meter of the kernels, and the memory that they publish to; goes on from what the memory holds."""

    def __init__(self, page: Any, ring: Any = None, capacity: int = 0) -> None:
        count = page_slots(page)
        self.page: npt.NDArray[np.uint64] = np.frombuffer(page, "<u8", layout.page_bytes(count) // 8)
        self.slots = np.zeros(count, layout.SLOT_DTYPE)
        self.meter = np.zeros(1, layout.METER_DTYPE)
        self.rows = self.page[layout.WORD_ROWS : layout.page_words(count)].reshape(count, layout.LINE_WORDS)
        self.line = self.page[layout.WORD_STEP_LINE : layout.WORD_STEP_LINE + layout.LINE_WORDS]
        # Whatever a predecessor left half-written carries this tag or the one before, never the next.
        self.slots["tag"] = (self.rows[:, 0] >> _VALUE_BITS) % layout.LINE_TAGS + 1
        self.meter["tag"] = (self.line[0] >> _VALUE_BITS) % layout.LINE_TAGS + 1
        last = self.line & np.uint64(layout.VALUE_MASK)
        for name, field in (("step", "step"), ("computed", "computed"), ("emitted", "emitted")):
            self.meter[name] = last[layout.STEP_FIELDS.index(field)]
        self.meter["busy_ns"] = last[layout.STEP_FIELDS.index("busy_us")] * np.uint64(1000)
        self.meter["epoch_ns"] = self.page[layout.WORD_EPOCH_DEVICE_NS]
        self.capacity = capacity if ring is not None else 0
        self.ring: npt.NDArray[np.uint64] | None = None
        if ring is not None:
            writer = RingWriter(ring, capacity)
            self.meter["head"] = writer.position
            writer.close()
            self.ring = np.frombuffer(ring, "<u8", ring_bytes(capacity) // 8)

    def publishes(self, rows: int, width: int, ring: bool) -> bool:
        if not ring or self.ring is None:
            return False
        if rows * width > self.capacity:
            raise ValueError(f"{rows} x {width} tokens do not fit a ring of {self.capacity}")
        return True


class CompiledMeter:
    """The kernels' own text, built for the CPU (`build.host_library`). block: 1, or more for tests of the kernels."""

    def __init__(self, library: Path, page: Any, ring: Any = None, capacity: int = 0, *, block: int = 1) -> None:
        self._state = MeterState(page, ring, capacity)
        self.block = block
        self.library = ctypes.CDLL(str(library))
        self.library.evap_clock.argtypes = [ctypes.c_uint64]

    def begin(self, joins: Sequence[Join], now_ns: int) -> None:
        state = self._state
        table = np.array(joins, np.int64).reshape(-1, len(layout.JOIN_FIELDS)).astype(np.int32)
        self.library.evap_clock(now_ns)
        self.library.evap_meter_begin(
            self.block, _pointer(table), len(table), _pointer(state.slots), len(state.slots), _pointer(state.meter),
            _pointer(state.page),
        )  # fmt: skip

    def step(self, slots: Ints, tokens: Ints, counts: Ints | None, now_ns: int, *, ring: bool = True) -> None:
        state, (rows, width) = self._state, tokens.shape
        publishes = state.publishes(rows, width, ring)
        wide = tokens.dtype == np.int64
        slots = np.ascontiguousarray(slots, np.int32)
        tokens = np.ascontiguousarray(tokens, np.int64 if wide else np.int32)
        counts = None if counts is None else np.ascontiguousarray(counts, np.int32)
        self.library.evap_clock(now_ns)
        call = self.library.evap_meter_step_i64 if wide else self.library.evap_meter_step
        call(
            self.block, _pointer(slots), _pointer(tokens), _pointer(counts), rows, width, _pointer(state.slots),
            len(state.slots), _pointer(state.meter), _pointer(state.page), _pointer(state.ring if publishes else None),
            state.capacity,
        )  # fmt: skip


def _pointer(array: npt.NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


class NumpyMeter:
    """The kernels' results without a compiler."""

    def __init__(self, page: Any, ring: Any = None, capacity: int = 0) -> None:
        self._state = MeterState(page, ring, capacity)

    def begin(self, joins: Sequence[Join], now_ns: int) -> None:
        state = self._state
        state.meter["begin_ns"] = now_ns
        table = np.array(joins, np.int64).reshape(-1, len(layout.JOIN_FIELDS))
        table = table[(table[:, 0] >= 0) & (table[:, 0] < len(state.slots))]
        slots = table[:, 0]
        fresh = np.zeros(len(slots), layout.SLOT_DTYPE)
        fresh["tag"] = state.slots["tag"][slots]
        fresh["generation"] = table[:, 1] & 0xFFFF
        for column, name in enumerate(("prompt", "cached", "limit"), start=2):
            fresh[name] = table[:, column].astype(np.uint32)
        fresh["eos"] = table[:, 5].astype(np.int32)
        state.slots[slots] = fresh
        _put_rows(state, slots)

    def step(self, slots: Ints, tokens: Ints, counts: Ints | None, now_ns: int, *, ring: bool = True) -> None:
        state, (rows, width) = self._state, tokens.shape
        publishes = state.publishes(rows, width, ring)
        kept = np.ones(rows, np.int64) if counts is None else np.clip(counts, 0, width).astype(np.int64)
        chosen = np.flatnonzero((slots >= 0) & (slots < len(state.slots)))
        slot, token, kept = slots[chosen].astype(np.int64), tokens[chosen].astype(np.int64), kept[chosen]
        now_us = (now_ns - int(state.meter["epoch_ns"][0])) // 1000 & layout.VALUE_MASK
        table = state.slots
        table["steps"][slot] += 1
        sampled = slot[kept > 0]
        table["first_us"][sampled[table["computed"][sampled] == 0]] = now_us
        table["last_us"][sampled] = now_us
        table["computed"][slot] += kept.astype(np.uint32)
        fresh = self._emit(slot, token, kept)
        _put_rows(state, slot)
        if publishes:
            self._put_records(slot, token, fresh)
        self._put_step_line(int(kept.sum()), int(fresh.sum()), now_ns, rows, publishes)

    def _emit(self, slot: npt.NDArray[Any], token: npt.NDArray[Any], kept: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Tokens emitted per row: up to the end token or the limit, nothing after either."""
        table = self._state.slots
        emitted, finish = table["emitted"][slot], table["finish"][slot]
        eos, limit = table["eos"][slot], table["limit"][slot]
        fresh = np.zeros(len(slot), np.int64)
        for k in range(token.shape[1]):
            live = (k < kept) & (finish == 0)
            emitted[live] += 1
            fresh[live] += 1
            ended = live & (eos >= 0) & (token[:, k] == eos)
            full = live & ~ended & (emitted >= limit)
            finish[ended] = Finish.STOP
            finish[full] = Finish.LENGTH
        table["emitted"][slot], table["finish"][slot] = emitted, finish
        return fresh

    def _put_records(self, slot: npt.NDArray[Any], token: npt.NDArray[Any], fresh: npt.NDArray[np.int64]) -> None:
        state, table = self._state, self._state.slots
        assert state.ring is not None
        row = np.repeat(np.arange(len(slot)), fresh)
        k = np.arange(len(row)) - np.repeat(np.cumsum(fresh) - fresh, fresh)
        head = int(state.meter["head"][0])
        position = np.arange(len(row), dtype=np.uint64) + np.uint64(head)
        tag = (position % np.uint64(TAG_CYCLE) + np.uint64(1)) << np.uint64(32)
        finish = np.where(k + 1 == fresh[row], table["finish"][slot[row]], 0)
        flags = np.where(finish == Finish.STOP, Finish.STOP | SILENT, finish)
        step = (int(state.meter["step"][0]) + 1) & STEP_MASK
        payloads = (
            table["generation"][slot[row]].astype(np.int64) << 16 | slot[row],
            token[row, k] & 0xFFFF_FFFF,
            table["emitted"][slot[row]].astype(np.int64) - fresh[row] + k,
            step << 8 | flags,
        )
        records = state.ring[WORD_RECORDS:].reshape(-1, RECORD_WORDS)
        places = (position % np.uint64(state.capacity)).astype(np.int64)
        for word, payload in enumerate(payloads):
            records[places, word] = tag | payload.astype(np.uint64)
        state.meter["head"] = head + len(row)

    def _put_step_line(self, computed: int, emitted: int, now_ns: int, rows: int, publishes: bool) -> None:
        state, meter = self._state, self._state.meter
        begin_ns, epoch_ns = int(meter["begin_ns"][0]), int(meter["epoch_ns"][0])
        meter["step"] += 1
        meter["tag"] = int(meter["tag"][0]) % layout.LINE_TAGS + 1
        meter["computed"] += computed
        meter["emitted"] += emitted
        meter["busy_ns"] += now_ns - begin_ns
        values = [int(meter[f][0]) for f in ("step", "head", "computed", "emitted")]
        values += [(begin_ns - epoch_ns) // 1000, (now_ns - epoch_ns) // 1000, int(meter["busy_ns"][0]) // 1000, rows]
        if publishes and state.ring is not None:
            state.ring[WORD_HEAD] = meter["head"][0]
        for word in reversed(range(layout.LINE_WORDS)):
            state.line[word] = int(meter["tag"][0]) << layout.VALUE_BITS | values[word] & layout.VALUE_MASK


def _put_rows(state: MeterState, slots: npt.NDArray[Any]) -> None:
    table = state.slots
    table["tag"][slots] = table["tag"][slots] % layout.LINE_TAGS + 1
    rows = table[slots]
    tag = rows["tag"].astype(np.uint64) << _VALUE_BITS
    who = rows["generation"].astype(np.uint64) | rows["finish"].astype(np.uint64) << np.uint64(16)
    values = (who, *(rows[name].astype(np.uint64) for name in layout.ROW_FIELDS[1:]))
    for column in reversed(range(layout.LINE_WORDS)):  # word 0, with the generation, last
        state.rows[slots, column] = tag | values[column]
