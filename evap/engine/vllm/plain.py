"""The plain outputs of a step, read out of the engine core's message by numpy: no Python object per token.

Nearly all outputs of a step are one token and nothing else. In msgpack such a one is

    lead, request id, 0x91, the token (1, 2, 3 or 5 bytes), rest

where `lead` and `rest` (the members that are not set) are always the same bytes, learnt from a sample encoded by the
installed vLLM. The rests are looked for; what lies between two of them says how long the token is, and must begin with
`lead` and an id of ours. Whatever is not plain is left, as a message of its own, to a decoder.

Rule 1: an output counts as plain only if each of its bytes is accounted for; the first byte of an integer says how many
        follow, so none can hide in it.
Rule 2: the arrays of slots are the same objects as long as the steps have the same requests: callers may go by that.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from evap.arrays import every
from evap.engine.vllm.ids import LENGTH, MARK, SLOT_AT
from evap.messages import Int32, UInt8

_NIL: Final = 0xC0
_LIST_OF_ONE: Final = b"\x91"
_FOUR_BYTES: Final = np.dtype(">u4")
#: strides of an array that has an element at each byte of a frame
_EACH: Final = (1,)
_Places = npt.NDArray[np.intp]
#: By a token's width in bytes, 0..6 (0 and 6 stand for all that cannot be): the bits of the last four bytes that are
#: its value; and, by width * 256 + its first byte, whether that byte says so.
_VALUE: Final = np.array([0, 0x7F, 0xFF, 0xFFFF, 0, 0x7FFFFFFF, 0], np.uint32)
_SOUND: Final = np.zeros(7 * 256, np.bool_)
_SOUND[256 : 256 + 0x80] = True
_SOUND[[2 * 256 + 0xCC, 3 * 256 + 0xCD, 5 * 256 + 0xCE]] = True
_WIDTHS: Final = (3, 1, 2, 5)
_EIGHT_DIGITS: Final = np.dtype(">u8")


class Found(NamedTuple):
    """Arrays of one length (int32), and the message of what was not plain, if anything was."""

    slots: Int32
    generations: Int32
    tokens: Int32
    others: bytes | None
    other_count: int


class PlainReader:
    """message: an encoded EngineCoreOutputs with one plain output, whose token is 1; output: the same, encoded alone;
    request_id: its id. Raises ValueError when plain outputs could not be told from others in this encoding."""

    def __init__(self, message: bytes, output: bytes, request_id: str) -> None:
        begin = message.index(output)
        self._head, count = message[: begin - 1], message[begin - 1 : begin]
        lead, _, after = output.partition(request_id.encode())
        token, self._rest = after[:2], after[2:]
        #: place of the byte in `rest` that is looked for
        self._mark = self._rest.find(b"\x00")
        if count != _LIST_OF_ONE or token != _LIST_OF_ONE + b"\x01" or len(request_id) != LENGTH:
            raise ValueError("vLLM's messages are not encoded as expected")
        if self._mark < 8 or set(self._rest[: self._mark]) != {_NIL}:
            raise ValueError("vLLM's messages have no mark by which plain outputs could be known")
        self._lead = lead + MARK.encode()
        self._slot_at = len(lead) + SLOT_AT
        self._before = len(lead) + LENGTH + 1  # bytes of an output before its token
        self._before_type, self._rest_type = np.dtype(f"V{self._before}"), np.dtype(f"V{len(self._rest)}")
        self._rest_row = np.frombuffer(self._rest, np.uint8)
        self._seen = b""
        self._slots: Int32 = np.empty(0, np.int32)
        self._generations: Int32 = np.empty(0, np.int32)

    def read(self, frame: bytes) -> Found | None:
        """None: nothing plain is in it."""
        first, total = self._outputs(frame)
        if not total:
            return None
        data: UInt8 = np.frombuffer(frame, np.uint8)
        ends = self._ends(frame, data, first)
        if not len(ends):
            return None
        starts, sound = self._starts(frame, data, ends, first)
        if sound is not None:
            ends, starts = ends[sound], starts[sound]
            if not len(ends):
                return None
        size = len(frame)
        values = np.ndarray((size - 3,), _FOUR_BYTES, frame, 0, _EACH)[ends - 4] & _VALUE[ends - starts]
        before = self._before
        who = np.ndarray((size - before + 1,), self._before_type, frame, 0, _EACH)[starts - before].tobytes()
        if who != self._seen:
            known = self._identify(who)
            if not every(known):
                ends, starts, values = ends[known], starts[known], values[known]
                if not len(ends):
                    return None
        others = total - len(ends)
        message = self._without(frame, first, starts, ends, others) if others else None
        return Found(self._slots, self._generations, values.view(np.int32), message, others)

    def _outputs(self, frame: bytes) -> tuple[int, int]:
        """(place of the first output, number of outputs); 0 of them if this is another kind of message."""
        at = len(self._head)
        if not frame.startswith(self._head) or len(frame) < at + 5:
            return 0, 0
        kind = frame[at]
        if 0x90 <= kind <= 0x9F:
            return at + 1, kind & 0x0F
        if kind == 0xDC:
            return at + 3, int.from_bytes(frame[at + 1 : at + 3], "big")
        return 0, 0

    def _ends(self, frame: bytes, data: UInt8, first: int) -> _Places:
        """Where a token ends and a `rest` begins."""
        mark, size = self._mark, len(self._rest)
        begin = first + self._before + 1 + mark
        marks = (data[begin : len(frame) - size + mark + 1] == 0).nonzero()[0]
        marks += begin - 1
        ends = marks[data[marks] == _NIL]
        ends -= mark - 1
        rests = np.ndarray((len(frame) - size + 1,), self._rest_type, frame, 0, _EACH)[ends].tobytes()
        if rests != self._rest * len(ends):
            rows = np.frombuffer(rests, np.uint8).reshape(-1, size)
            ends = ends[(rows == self._rest_row).all(1)]
        found: _Places = ends
        return found

    def _starts(
        self, frame: bytes, data: UInt8, ends: _Places, first: int
    ) -> tuple[_Places, npt.NDArray[np.bool_] | None]:
        """Where each token starts: behind the output before, or, behind one that is not plain, wherever it fits. And
        which of them are tokens; None: all."""
        starts = np.empty_like(ends)
        starts[0] = first + self._before
        np.add(ends[:-1], len(self._rest) + self._before, out=starts[1:])
        sound = _sound(data, starts, ends)
        if every(sound):
            return starts, None
        for n in np.flatnonzero(~sound).tolist():
            starts[n] = self._start(frame, int(ends[n]))
        return starts, _sound(data, starts, ends)

    def _start(self, frame: bytes, end: int) -> int:
        for width in _WIDTHS:
            start = end - width
            if frame.startswith(self._lead, start - self._before) and frame[start - 1] == _LIST_OF_ONE[0]:
                return start
        return end  # a width of 0: no token of ours

    def _identify(self, who: bytes) -> npt.NDArray[np.bool_]:
        """Sets slots and generations from the bytes before each token. False where these are not an output of ours."""
        each, lead = (self._before,), self._lead
        count = len(who) // self._before
        known: npt.NDArray[np.bool_] = np.ndarray((count,), np.uint8, who, self._before - 1, each) == _LIST_OF_ONE[0]
        if np.ndarray((count,), f"V{len(lead)}", who, 0, each).tobytes() != lead * count:
            known &= np.array([who.startswith(lead, n * self._before) for n in range(count)])
        digits = np.ndarray((count,), _EIGHT_DIGITS, who, self._slot_at, each)[known]
        self._slots, self._generations = _pairs(digits.astype(np.uint64))  # from here on in the machine's byte order
        self._slots.flags.writeable = self._generations.flags.writeable = False
        self._seen = who if every(known) else b""
        return known

    def _without(self, frame: bytes, first: int, starts: _Places, ends: _Places, count: int) -> bytes:
        """The message with only those outputs that are not plain."""
        begins, finishes = starts - self._before, ends + len(self._rest)
        pieces = [self._head, b"\xdd" + count.to_bytes(4, "big"), frame[first : int(begins[0])]]
        for n in np.flatnonzero(begins[1:] != finishes[:-1]).tolist():
            pieces.append(frame[int(finishes[n]) : int(begins[n + 1])])
        pieces.append(frame[int(finishes[-1]) :])
        return b"".join(pieces)


def _sound(data: UInt8, starts: _Places, ends: _Places) -> npt.NDArray[np.bool_]:
    """Whether from each start to its end there is one integer."""
    which = ends - starts
    which <<= 8
    which += data.take(starts, mode="clip")
    return _SOUND.take(which, mode="clip")


def _pairs(digits: npt.NDArray[np.uint64]) -> tuple[Int32, Int32]:
    """Two numbers of four hexadecimal digits each, from their eight ASCII characters: all digits at once."""
    letter = (digits >> np.uint64(6)) & np.uint64(0x0101010101010101)
    x = (digits & np.uint64(0x0F0F0F0F0F0F0F0F)) + letter * np.uint64(9)
    x = (x | (x >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
    x = (x | (x >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
    return (x >> np.uint64(32)).astype(np.int32), (x & np.uint64(0xFFFF)).astype(np.int32)
