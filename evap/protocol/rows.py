"""DATA frames as numpy rows: a step of all streams of a connection is one gather and one write.

Every running slot that needs no text processing owns a *row*: a complete HTTP/2 DATA frame (or HTTP/1.1 chunk)
whose JSON text field has a fixed width, because JSON allows spaces after the closing quote. Frame header, prefix and
tail are written once, when the slot joins; a step gathers the rows of its slots and fills in the text fields:

    out = rows[slots]; out["text"] = fragments[tokens]

Rules:
1. `push` never hands out a live view: `out` is a fresh array, so the transport may keep it for as long as it likes.
2. A record is written as a row only if all records of its slot in this batch can be; else all of them are returned
   to the caller, so that the tokens of a stream keep their order.
3. While a stream is on rows its flow-control window lives here (`window`), and is written back to the wire core
   before the core looks at it (`before_window_frame`, `release`). The connection's window is always the core's.
4. n choices of one request share one stream, so one window cell.
5. Joining and leaving touch one row: O(1).
"""

from __future__ import annotations

import mmap
import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from evap.protocol.events import Reply, RowCore

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int32]

_H2_HEAD: Final = struct.Struct(">HBBBL")
OFF: Final = -1
#: a group's key is format * _LANES + lane, in 31 bits
_LANES: Final = 1 << 22


class _Format:
    """Rows of one shape: all have the same header, prefix, text and tail widths. Memory: max_slots x width.

    charge: bytes that flow control counts (RFC 9113 5.2: the payload of DATA, not the frame header).
    """

    __slots__ = ("charge", "dtype", "rows", "width")

    def __init__(self, max_slots: int, head: int, prefix: int, text: int, tail: int) -> None:
        self.dtype = np.dtype([("head", f"V{head + prefix}"), ("text", f"V{text}"), ("tail", f"V{tail}")])
        self.width = self.dtype.itemsize
        self.charge = self.width - head
        # One page-aligned, shareable segment: it can be pinned, and the device could fill in the text fields.
        segment = mmap.mmap(-1, max_slots * self.width)
        self.rows = np.frombuffer(segment, dtype=self.dtype)


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
    bytes) is indexed by cell;
    `delivered` (int64 tokens) counts what was handed to the transport within the windows.
    """

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.lane: IntArray = np.full(max_slots, OFF, np.int32)
        self.cell: IntArray = np.arange(max_slots, dtype=np.int32)
        self.form: IntArray = np.zeros(max_slots, np.int32)
        self.stream: npt.NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self.window: npt.NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self.delivered: npt.NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self._charges: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._mark: BoolArray = np.zeros(max_slots, np.bool_)
        self._stamp: IntArray = np.zeros(max_slots, np.int32)
        self._formats: list[_Format] = []
        self._format_numbers: dict[tuple[int, int, int, int], int] = {}
        self._lanes: list[_Lane | None] = []
        self._free_lanes: list[int] = []
        self._lane_of: dict[int, int] = {}  # id(core) -> lane number

    # Joining and leaving

    def join(self, slot: int, reply: Reply, prefix: bytes, tail: bytes, text_width: int) -> bool:
        """Put a slot on rows. False (and nothing happens) if its stream cannot take any now: see RowCore.acquire.

        The slot must not be on rows.
        """
        core: RowCore = reply.core
        stream_id = reply.stream_id
        number = self._lane_of.get(id(core), OFF)
        lane = self._lane(number) if number != OFF else None
        if lane is not None and stream_id in lane.members:
            if not reply.alive or reply.buffered:
                return False
            lane.members[stream_id].append(slot)
            self.cell[slot] = lane.cells[stream_id]
        else:
            window = core.acquire(reply)
            if window is None:
                return False
            number = self._new_lane(core) if number == OFF else number
            lane = self._lane(number)
            lane.members[stream_id] = [slot]
            lane.cells[stream_id] = slot
            self.cell[slot] = slot
            self.window[slot] = window
        self.form[slot] = self._fill(slot, reply.version, stream_id, prefix, tail, text_width)
        self.stream[slot] = stream_id
        self.lane[slot] = number
        return True

    def leave(self, slot: int) -> None:
        """Take a slot off rows. Its stream's window goes back to the core with the last one. No-op if it is on none."""
        number = int(self.lane[slot])
        if number == OFF:
            return
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

    def __contains__(self, slot: int) -> bool:
        return bool(self.lane[slot] != OFF)

    # Windows: what the core calls around WINDOW_UPDATE and SETTINGS frames (stream 0 is all)

    def before_window_frame(self, core: RowCore, stream_id: int) -> None:
        for lane, sid in self._affected(core, stream_id):
            self._write_back(lane, sid)

    def after_window_frame(self, core: RowCore, stream_id: int) -> None:
        for lane, sid in self._affected(core, stream_id):
            self.window[lane.cells[sid]] = core.stream_window(sid)

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

    def push(self, slots: IntArray, fields: npt.NDArray[np.void], ok: BoolArray) -> BoolArray:
        """Write one row per record, in order. All arrays have the batch's length.

        fields: V{text width}: the text of each record. ok: records that may be rows at all (their token is fast);
        it is changed in place. Returns `ok`: True where the row was appended to its connection's output; the caller
        sends the others its own way, after which their slots are no longer on rows.
        """
        lanes = self.lane[slots]
        ok &= lanes != OFF
        if not ok.all():
            self._whole_slots(slots, ok)
        if not ok.any():
            return ok
        every = bool(ok.all())
        chosen = slots if every else slots[ok]
        if not every:
            lanes, fields = lanes[ok], fields[ok]
        forms = self.form[chosen]
        charges = self._charges[forms]
        cells = self.cell[chosen]
        single = self._unique(cells)
        fits = self._fits(cells, charges, single)
        if not fits.all():
            ok[np.flatnonzero(ok)[~fits]] = False
            if not fits.any():
                return ok
            chosen, lanes, forms, fields = chosen[fits], lanes[fits], forms[fits], fields[fits]
            charges, cells = charges[fits], cells[fits]
        refused = self._write(chosen, lanes, forms, fields)
        if refused is not None:
            ok[np.flatnonzero(ok)[refused]] = False
            chosen, charges, cells = chosen[~refused], charges[~refused], cells[~refused]
        if single:
            self.window[cells] -= charges
            self.delivered[chosen] += 1
        else:
            np.subtract.at(self.window, cells, charges)
            np.add.at(self.delivered, chosen, 1)
        return ok

    def _whole_slots(self, slots: IntArray, ok: BoolArray) -> None:
        """Rule 2: one bad record takes all records of its slot with it."""
        bad = slots[~ok]
        self._mark[bad] = True
        ok &= ~self._mark[slots]
        self._mark[bad] = False

    def _fits(self, cells: IntArray, charges: npt.NDArray[np.int64], single: bool) -> BoolArray:
        """True where the stream's window takes all its records of this batch."""
        if single:
            return np.asarray(self.window[cells] >= charges)
        need = np.bincount(cells, weights=charges, minlength=self.max_slots)
        return np.asarray(self.window[cells] >= need[cells])

    def _unique(self, cells: IntArray) -> bool:
        numbers = np.arange(len(cells), dtype=np.int32)
        self._stamp[cells] = numbers
        return bool((self._stamp[cells] == numbers).all())

    def _write(
        self, slots: IntArray, lanes: IntArray, forms: IntArray, fields: npt.NDArray[np.void]
    ) -> BoolArray | None:
        """One gather per format, one append per connection. True where a connection has no room; None: nowhere."""
        keys = forms * _LANES + lanes
        order = None
        if (keys[1:] < keys[:-1]).any():
            order = np.argsort(keys, kind="stable")
            slots, keys, fields = slots[order], keys[order], fields[order]
        edges = np.flatnonzero(keys[1:] != keys[:-1]) + 1
        bounds = [0, *edges.tolist(), len(keys)]
        refused: BoolArray | None = None
        done = 0
        while done < len(bounds) - 1:
            number = int(keys[bounds[done]]) // _LANES
            last = done
            while last < len(bounds) - 1 and int(keys[bounds[last]]) // _LANES == number:
                last += 1
            refused = self._write_format(number, keys, slots, fields, bounds[done : last + 1], refused)
            done = last
        if refused is not None and order is not None:
            back = np.zeros_like(refused)
            back[order] = refused
            return back
        return refused

    def _write_format(
        self,
        number: int,
        keys: IntArray,
        slots: IntArray,
        fields: npt.NDArray[np.void],
        bounds: list[int],
        refused: BoolArray | None,
    ) -> BoolArray | None:
        """Rows of one format: bounds[k]:bounds[k + 1] are those of one connection."""
        form = self._formats[number]
        first = bounds[0]
        out = form.rows[slots[first : bounds[-1]]]
        out["text"] = fields[first : bounds[-1]]
        data = out.view(np.uint8).data
        width, charge, lanes = form.width, form.charge, self._lanes
        for lane_key, a, b in zip(keys[bounds[:-1]].tolist(), bounds, bounds[1:], strict=False):
            lane = lanes[lane_key % _LANES]
            assert lane is not None
            if lane.core.take_rows(data[(a - first) * width : (b - first) * width], b - a, (b - a) * charge):
                continue
            if refused is None:
                refused = np.zeros(len(slots), np.bool_)
            refused[a:b] = True
        return refused

    # Formats and lanes

    def _fill(self, slot: int, version: str, stream_id: int, prefix: bytes, tail: bytes, text_width: int) -> int:
        payload = len(prefix) + text_width + len(tail)
        if version == "2":
            head = _H2_HEAD.pack(payload >> 8, payload & 255, 0, 0, stream_id)
        else:
            head, tail = b"%x\r\n" % payload, tail + b"\r\n"
        key = (len(head), len(prefix), text_width, len(tail))
        number = self._format_numbers.get(key)
        if number is None:
            number = self._new_format(key)
        row = self._formats[number].rows
        row["head"][slot] = np.void(head + prefix)
        row["tail"][slot] = np.void(tail)
        return number

    def _new_format(self, key: tuple[int, int, int, int]) -> int:
        if len(self._formats) == 256:
            raise RuntimeError("more than 256 row formats")
        self._formats.append(_Format(self.max_slots, *key))
        self._charges = np.array([f.charge for f in self._formats], np.int64)
        # HTTP/1.1 has no windows; its cells hold a number that no response reaches.
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
