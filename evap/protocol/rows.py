"""DATA frames as numpy rows: a step of all streams of a connection is one gather and one write.

Every running slot that needs no text processing owns a *row*: a complete HTTP/2 DATA frame (or HTTP/1.1 chunk)
whose JSON text field has a fixed width, because JSON allows spaces after the closing quote. Frame header, prefix and
tail are written once, when the slot joins. The slots of a step, sorted by connection, make a *plan* with dense copies
of their rows; as long as the next step has the same slots on rows it is

    plan.text[:] = fragments[tokens]        and one slice of the dense rows for each connection.

Rules:
1. `push` never hands out a live view: what a connection is given is a copy that nobody changes.
2. A record is written as a row only if all records of its slot in this batch can be; else all of them are returned
   to the caller, so that the tokens of a stream keep their order.
3. While a stream is on rows its flow-control window lives here (`window`), and is written back to the wire core
   before the core looks at it (`before_window_frame`, `release`). The connection's window is always the core's.
4. n choices of one request share one stream, so one window cell.
5. Joining and leaving touch one row: O(1), and cost the next step a new plan.
6. A plan counts its steps; `_apply` turns them into windows and delivered tokens before anybody looks at those.
"""

from __future__ import annotations

import itertools
import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from evap.arrays import every, some
from evap.protocol.events import Reply, RowCore
from evap.protocol.rowplan import Format, Part, Plan, Tables

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int32]

_H2_HEAD: Final = struct.Struct(">HBBBL")
OFF: Final = -1
#: a group's key is format * _LANES + lane, in 31 bits
_LANES: Final = 1 << 22


class _Lane:
    """A connection that has slots on rows."""

    __slots__ = ("cells", "core", "members")

    def __init__(self, core: RowCore) -> None:
        self.core = core
        self.members: dict[int, list[int]] = {}  # stream id -> its slots that are on rows
        self.cells: dict[int, int] = {}  # stream id -> window cell


class RowTable:
    """The rows of all connections. Used from the loop's thread only.

    max_slots: size of the slot table. Arrays are indexed by slot: lane (int32, OFF when not on rows), cell (int32, the
    slot that holds the stream's window), form (int32 format number), stream (int64 HTTP/2 stream id); `window` (int64
    bytes) is indexed by cell.
    """

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.lane: IntArray = np.full(max_slots, OFF, np.int32)
        self.cell: IntArray = np.arange(max_slots, dtype=np.int32)
        self.form: IntArray = np.zeros(max_slots, np.int32)
        self.stream: npt.NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self.window: npt.NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self._delivered: npt.NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self._plan: Plan | None = None
        self._charges: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._mark: BoolArray = np.zeros(max_slots, np.bool_)
        self._formats: list[Format] = []
        self._format_numbers: dict[tuple[int, int, int, int, int], int] = {}
        self._lanes: list[_Lane | None] = []
        self._free_lanes: list[int] = []
        self._lane_of: dict[int, int] = {}  # id(core) -> lane number

    # Joining and leaving

    def join(self, slot: int, reply: Reply, prefix: bytes, tail: bytes, text_width: int, table: int = 0) -> bool:
        """Put a slot on rows. False (and nothing happens) if its stream cannot take any now: see RowCore.acquire.

        The slot must not be on rows. table: number of the table that its text comes from, whose fields are that wide.
        """
        core: RowCore = reply.core
        stream_id = reply.stream_id
        number = self._lane_of.get(id(core), OFF)
        lane = self._lane(number) if number != OFF else None
        if lane is not None and stream_id in lane.members:
            if not reply.alive or reply.buffered:
                return False
            self._apply()
            lane.members[stream_id].append(slot)
            self.cell[slot] = lane.cells[stream_id]
        else:
            window = core.acquire(reply)
            if window is None:
                return False
            self._apply()
            number = self._new_lane(core) if number == OFF else number
            lane = self._lane(number)
            lane.members[stream_id] = [slot]
            lane.cells[stream_id] = slot
            self.cell[slot] = slot
            self.window[slot] = window
        self.form[slot] = self._fill(slot, reply, (prefix, tail), text_width, table)
        self.stream[slot] = stream_id
        self.lane[slot] = number
        return True

    def leave(self, slot: int) -> None:
        """Take a slot off rows. Its stream's window goes back to the core with the last one. No-op if it is on none."""
        number = int(self.lane[slot])
        if number == OFF:
            return
        self._apply()
        self.lane[slot] = OFF
        lane = self._lane(number)
        stream_id = int(self.stream[slot])
        members = lane.members[stream_id]
        members.remove(slot)
        if not members:
            self._off(number, lane, stream_id)

    def release(self, reply: Reply) -> None:
        """Take all slots of a stream off rows, before the core itself sends on it or after the stream is gone."""
        number = self._lane_of.get(id(reply.core))
        if number is None:
            return
        lane = self._lane(number)
        members = lane.members.get(reply.stream_id)
        if members is None:
            return
        self._apply()
        for slot in members:
            self.lane[slot] = OFF
        self._off(number, lane, reply.stream_id)

    def _off(self, number: int, lane: _Lane, stream_id: int) -> None:
        """No slot of the stream is on rows any more."""
        self._write_back(lane, stream_id)
        del lane.members[stream_id], lane.cells[stream_id]
        lane.core.on_rows(stream_id, False)
        if not lane.members:
            del self._lane_of[id(lane.core)]
            self._lanes[number] = None
            self._free_lanes.append(number)

    def forget(self, slot: int) -> None:
        """The slot has a new user: its count of delivered tokens starts anew."""
        if slot in self:
            self._apply()
        self._delivered[slot] = 0

    def delivered(self, slot: int) -> int:
        """Tokens of the slot's present user that were handed to its connection within the windows."""
        if slot in self and self._plan is not None and self._plan.steps:
            self._settle(self._plan)
        return int(self._delivered[slot])

    def __contains__(self, slot: int) -> bool:
        return bool(self.lane[slot] != OFF)

    # Windows: what the core calls around WINDOW_UPDATE and SETTINGS frames (stream 0 is all)

    def before_window_frame(self, core: RowCore, stream_id: int) -> None:
        if self._plan is not None:
            self._settle(self._plan)
        for lane, sid in self._affected(core, stream_id):
            self._write_back(lane, sid)

    def after_window_frame(self, core: RowCore, stream_id: int) -> None:
        for lane, sid in self._affected(core, stream_id):
            self.window[lane.cells[sid]] = core.stream_window(sid)
        if self._plan is not None:
            self._settle(self._plan)

    def _affected(self, core: RowCore, stream_id: int) -> list[tuple[_Lane, int]]:
        number = self._lane_of.get(id(core))
        if number is None:
            return []
        lane = self._lane(number)
        if stream_id == 0:
            return [(lane, sid) for sid in lane.cells]
        return [(lane, stream_id)] if stream_id in lane.cells else []

    def _write_back(self, lane: _Lane, stream_id: int) -> None:
        spent = lane.core.stream_window(stream_id) - int(self.window[lane.cells[stream_id]])
        if spent:
            lane.core.spend(stream_id, spent)

    # The step

    def push(self, slots: IntArray, tokens: IntArray, tables: Tables, ok: BoolArray) -> BoolArray:
        """Write one row per record, in order. slots, tokens and ok have the batch's length.

        tables: by number, see `join`. ok: records that may be rows at all (their token is fast). Returns `ok`, which is
        changed in place: True where the row was given to its connection; the caller sends the others its own way,
        after which their slots are no longer on rows.
        """
        plan = self._plan
        if plan is not None and plan.left > 0 and self._again(plan, slots, ok):
            refused = plan.run(tokens if plan.at is None else tokens[plan.at], tables)
            if refused is None:
                plan.left -= 1
                plan.steps += 1
                return ok
            self._apply()
            return self._took(plan, refused, ok)
        self._apply()
        return self._push(slots, tokens, tables, ok)

    def _again(self, plan: Plan, slots: IntArray, ok: BoolArray) -> bool:
        """The batch's slots on rows are the plan's (others may come and go), and no record of theirs is slow."""
        if not plan.same(slots):
            at = np.flatnonzero(self.lane[slots] != OFF)
            if not np.array_equal(plan.slots, slots[at]):
                return False
            plan.meet(slots, at if len(at) < len(slots) else None)
        if plan.at is None:
            return every(ok)
        if not every(ok[plan.at]):
            return False
        ok[:] = False
        ok[plan.at] = True
        return True

    def _push(self, slots: IntArray, tokens: IntArray, tables: Tables, ok: BoolArray) -> BoolArray:
        """Any batch: some slots may be off rows, some tokens slow, some windows too small."""
        on = self.lane[slots] != OFF
        ok &= on
        if not every(ok):
            self._whole_slots(slots, ok)
            if not some(ok):
                return ok
        charges = self._charges[self.form[slots]]
        ok[ok] = self._fits(self.cell[slots[ok]], charges[ok])
        if not some(ok):
            return ok
        whole = every(ok)
        plan = self._make(slots if whole else slots[ok])
        refused = plan.run(tokens if whole else tokens[ok], tables)
        if refused is None and np.array_equal(ok, on):
            if not whole:
                plan.meet(slots, np.flatnonzero(ok))
            self._keep(plan)
            return ok
        return self._took(plan, refused, ok)

    def _took(self, plan: Plan, refused: BoolArray | None, ok: BoolArray) -> BoolArray:
        """Account for one run of a plan of the records in `ok`, without those that a connection refused."""
        if refused is not None:
            ok[np.flatnonzero(ok)[refused]] = False
        taken = slice(None) if refused is None else ~refused
        np.subtract.at(self.window, plan.cells[taken], plan.charges[taken])
        np.add.at(self._delivered, plan.slots[taken], 1)
        return ok

    def _keep(self, plan: Plan) -> None:
        """The plan has run once. It may run again while the windows of its streams last."""
        plan.need = np.bincount(plan.cells, weights=plan.charges, minlength=self.max_slots)[plan.cells].astype(np.int64)
        plan.steps = 1
        self._settle(plan)
        self._plan = plan

    def _apply(self) -> None:
        """Settle the plan's steps, and forget it: slots, windows or formats are about to change."""
        if self._plan is not None:
            self._settle(self._plan)
            self._plan = None

    def _settle(self, plan: Plan) -> None:
        steps, plan.steps = plan.steps, 0
        if steps:
            np.subtract.at(self.window, plan.cells, plan.charges * steps)
            np.add.at(self._delivered, plan.slots, steps)
        # RFC 9113 6.9.2: SETTINGS may have made a window negative.
        plan.left = max(0, int((self.window[plan.cells] // plan.need).min()))

    def _whole_slots(self, slots: IntArray, ok: BoolArray) -> None:
        """Rule 2: one bad record takes all records of its slot with it."""
        bad = slots[~ok]
        self._mark[bad] = True
        ok &= ~self._mark[slots]
        self._mark[bad] = False

    def _fits(self, cells: IntArray, charges: npt.NDArray[np.int64]) -> BoolArray:
        """True where the stream's window takes all its records of this batch."""
        need = np.bincount(cells, weights=charges, minlength=self.max_slots)
        return np.asarray(self.window[cells] >= need[cells])

    def _make(self, slots: IntArray) -> Plan:
        keys = self.form[slots] * _LANES + self.lane[slots]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        edges = np.flatnonzero(keys[1:] != keys[:-1]) + 1
        bounds = [0, *edges.tolist(), len(keys)]
        parts: dict[int, Part] = {}
        for start, end in itertools.pairwise(bounds):
            number, lane = divmod(int(keys[start]), _LANES)
            part = parts.get(number)
            if part is None:
                part = parts[number] = Part(self._formats[number], start)
            part.add(self._lane(lane).core, start, end)
        for part in parts.values():
            part.fill(slots[order[part.start : part.end]])
        return Plan(slots, order, self.cell[slots], self._charges[self.form[slots]], list(parts.values()))

    # Formats and lanes

    def _fill(self, slot: int, reply: Reply, around: tuple[bytes, bytes], text_width: int, table: int) -> int:
        prefix, tail = around
        payload = len(prefix) + text_width + len(tail)
        if reply.version == "2":
            head = _H2_HEAD.pack(payload >> 8, payload & 255, 0, 0, reply.stream_id)
        else:
            head, tail = b"%x\r\n" % payload, tail + b"\r\n"
        key = (len(head), len(prefix), text_width, len(tail), table)
        number = self._format_numbers.get(key)
        if number is None:
            number = self._new_format(key)
        row = self._formats[number].rows
        row["head"][slot] = np.void(head + prefix)
        row["tail"][slot] = np.void(tail)
        return number

    def _new_format(self, key: tuple[int, int, int, int, int]) -> int:
        if len(self._formats) == 256:
            raise RuntimeError("more than 256 row formats")
        self._formats.append(Format(self.max_slots, *key))
        self._charges = np.array([f.charge for f in self._formats], np.int64)
        self._format_numbers[key] = len(self._formats) - 1
        return len(self._formats) - 1

    def _new_lane(self, core: RowCore) -> int:
        core.rows = self
        if self._free_lanes:
            number = self._free_lanes.pop()
        else:
            number = len(self._lanes)
            self._lanes.append(None)
        self._lanes[number] = _Lane(core)
        self._lane_of[id(core)] = number
        return number

    def _lane(self, number: int) -> _Lane:
        lane = self._lanes[number]
        assert lane is not None, "a slot is on rows of a connection that has none"
        return lane
