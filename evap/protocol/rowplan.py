"""The data of `rows.py`: rows of one format, and the plan of a step. No rules here but how a step runs."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from evap.protocol.events import RowCore

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int32]
#: the text field of each token, by table: V{text width}, shape (vocabulary,)
Tables: TypeAlias = Sequence[npt.NDArray[np.void]]


class Format:
    """Rows of one shape: all have the same header, prefix, text and tail widths. Memory: max_slots x width.

    charge: bytes that flow control counts (RFC 9113 5.2: the payload of DATA, not the frame header). table: number of
    the table that the text field is taken from.
    """

    __slots__ = ("charge", "dtype", "rows", "table", "width")

    def __init__(self, max_slots: int, head: int, prefix: int, text: int, tail: int, table: int) -> None:
        self.table = table
        self.dtype = np.dtype([("head", f"V{head + prefix}"), ("text", f"V{text}"), ("tail", f"V{tail}")])
        self.width = self.dtype.itemsize
        self.charge = self.width - head
        # One page-aligned, shareable segment: it can be pinned, and the device could fill in the text fields.
        segment = mmap.mmap(-1, max_slots * self.width)
        self.rows = np.frombuffer(segment, dtype=self.dtype)


class Part:
    """The records of a plan that have one format: dense rows, and which octets of them are whose."""

    __slots__ = ("end", "form", "groups", "rows", "start", "text", "view")

    def __init__(self, form: Format, start: int) -> None:
        self.form = form
        self.start = self.end = start
        #: (core, first octet, end, frames, charge) per connection
        self.groups: list[tuple[RowCore, int, int, int, int]] = []

    def add(self, core: RowCore, start: int, end: int) -> None:
        width, n = self.form.width, end - start
        self.groups.append((core, (start - self.start) * width, (end - self.start) * width, n, n * self.form.charge))
        self.end = end

    def fill(self, slots: IntArray) -> None:
        self.rows = self.form.rows[slots]
        self.text = self.rows["text"]
        self.view = memoryview(self.rows.view(np.uint8).data)


class Plan:
    """What a step with these slots does. Arrays have the batch's order; `order` sorts them by format and connection.

    batch: slots of all its records, also of those that are no rows; `at`: where the rows are in it, None for all.
    need: what a run takes from each record's window cell (n choices of a stream share one). left: runs that the windows
    have room for; steps: runs that are not settled yet. split: connections with rows of several formats, and what they
    take of its window in all: where that is short, none goes out as a row, and the outbox sends by urgency.
    """

    __slots__ = (
        "_given", "at", "batch", "cells", "charges", "left", "need", "order", "parts", "slots", "split", "steps",
    )  # fmt: skip

    def __init__(
        self,
        slots: IntArray,
        order: npt.NDArray[np.intp],
        cells: IntArray,
        charges: npt.NDArray[np.int64],
        parts: list[Part],
    ) -> None:
        self.slots = slots.copy()
        self.meet(slots, None)
        self.order = order
        self.cells = cells
        self.charges = self.need = charges
        self.parts = parts
        self.left = self.steps = 0
        self.split = _split(parts) if len(parts) > 1 else []

    def meet(self, batch: IntArray, at: npt.NDArray[np.intp] | None) -> None:
        """The plan's rows are the records `at` of this batch."""
        self.at = at
        self.batch = self.slots if at is None else batch.copy()
        self._given = batch if not batch.flags.writeable else None

    def same(self, slots: IntArray) -> bool:
        """Whether these are the slots of the batch. An array that nobody can write to is known by itself."""
        return slots is self._given or bool(np.array_equal(self.batch, slots))

    def run(self, tokens: IntArray, tables: Tables) -> BoolArray | None:
        """Give each connection its rows. True, in the batch's order, where a connection refused; None: nowhere."""
        ordered = tokens.take(self.order)
        refused: BoolArray | None = None
        short = {id(core) for core, charge in self.split if core.connection_window < charge} if self.split else None
        for part in self.parts:
            part.text[:] = tables[part.form.table].take(ordered[part.start : part.end])
            view, width = part.view, part.form.width
            for core, start, end, frames, charge in part.groups:
                if not (short and id(core) in short) and core.take_rows(bytes(view[start:end]), frames, charge):
                    continue
                if refused is None:
                    refused = np.zeros(len(self.slots), np.bool_)
                refused[self.order[part.start + start // width : part.start + end // width]] = True
        return refused


def _split(parts: list[Part]) -> list[tuple[RowCore, int]]:
    """Connections that are in more than one part, with the sum of their charges."""
    charges: dict[int, tuple[RowCore, int, int]] = {}
    for part in parts:
        for core, _, _, _, charge in part.groups:
            _, times, total = charges.get(id(core), (core, 0, 0))
            charges[id(core)] = core, times + 1, total + charge
    return [(core, total) for core, times, total in charges.values() if times > 1]
