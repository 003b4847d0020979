"""What the kernels must do, said again in plain Python: one token at a time, no arrays, no tags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evap.messages import SILENT, Finish, TokenBatch
from evap.metering import layout
from evap.metering.page import Row, StepLine, format_page
from evap.metering.writer import Join
from evap.ring import format_ring, ring_bytes

EPOCH_NS = 1_000_000_007
RECORD = tuple[int, int, int, int, int]  # slot, generation, token, index, flags


@dataclass
class Account:
    join: Join
    computed: int = 0
    emitted: int = 0
    finish: int = 0
    first_us: int = 0
    last_us: int = 0
    steps: int = 0

    def row(self) -> Row:
        j = self.join
        return Row(
            j.generation, self.finish, j.prompt, j.cached, self.computed, self.emitted, self.first_us, self.last_us,
            self.steps,
        )  # fmt: skip


@dataclass
class Reference:
    slots: int
    accounts: dict[int, Account] = field(default_factory=dict)
    records: list[RECORD] = field(default_factory=list)
    #: records published before each step, and the rows after it, by step number
    history: list[dict[int, Row]] = field(default_factory=lambda: [{}])
    begin_us: int = 0
    end_us: int = 0
    busy_ns: int = 0
    begin_ns: int = 0
    computed: int = 0
    emitted: int = 0
    rows: int = 0
    step_count: int = 0

    def begin(self, joins: list[Join], now_ns: int) -> None:
        self.begin_ns = now_ns
        for join in joins:
            if 0 <= join.slot < self.slots:
                self.accounts[join.slot] = Account(join)

    def step(self, slots: Any, tokens: Any, counts: Any, now_ns: int, *, ring: bool = True) -> None:
        self.end_us = (now_ns - EPOCH_NS) // 1000
        self.begin_us = (self.begin_ns - EPOCH_NS) // 1000
        self.busy_ns += now_ns - self.begin_ns
        self.rows = len(slots)
        self.step_count += 1
        for row, slot in enumerate(int(s) for s in slots):
            if not 0 <= slot < self.slots:
                continue
            a = self.accounts.setdefault(slot, Account(Join(slot, 0, 0, 0, 0, 0)))
            a.steps += 1
            kept = 1 if counts is None else min(max(int(counts[row]), 0), tokens.shape[1])
            for token in tokens[row][:kept].tolist():
                self._sampled(a, slot, token, ring)
        self.history.append({s: a.row() for s, a in self.accounts.items()})

    def _sampled(self, a: Account, slot: int, token: int, ring: bool) -> None:
        if not a.computed:
            a.first_us = self.end_us
        a.last_us = self.end_us
        a.computed += 1
        self.computed += 1
        if a.finish:
            return
        flags = 0
        if a.join.eos >= 0 and token == a.join.eos:
            a.finish, flags = Finish.STOP, Finish.STOP | SILENT
        elif a.emitted + 1 >= a.join.limit:
            a.finish = flags = Finish.LENGTH
        if ring:
            self.records.append((slot, a.join.generation, token, a.emitted, int(flags)))
        a.emitted += 1
        self.emitted += 1

    def step_line(self) -> StepLine:
        return StepLine(
            self.step_count, len(self.records), self.computed, self.emitted, self.begin_us, self.end_us,
            self.busy_ns // 1000, self.rows,
        )  # fmt: skip


def new_memory(slots: int, capacity: int) -> tuple[bytearray, bytearray]:
    """An empty page and an empty ring."""
    page, ring = bytearray(layout.page_bytes(slots)), bytearray(ring_bytes(capacity))
    format_page(page, slots, epoch_device_ns=EPOCH_NS, epoch_unix_ns=0)
    format_ring(ring, capacity)
    return page, ring


def records_of(batch: TokenBatch | None) -> list[RECORD]:
    if batch is None:
        return []
    columns = (batch.slot, batch.generation, batch.token, batch.index, batch.flags)
    return list(zip(*(c.tolist() for c in columns), strict=True))


def int32(values: Any, shape: tuple[int, ...]) -> Any:
    return np.array(values, np.int32).reshape(shape)
