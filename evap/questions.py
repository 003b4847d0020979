"""Questions that a server's parent asks its loop processes, and what their answers come to.

    metrics     each one's Snapshot; together: added up, with what dead processes had counted
    usage       what is known of an exchange (JSON, or nothing); together: the first that is something
    flush       records that are not durable yet (a number); together: the sum
    block       a piece of a pushed answer (`copies.py`), of the process that keeps it

Who does not answer within a second (it is stopped, say) is left out; but its counters are read where they are.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec

from evap import between
from evap.loop_child import Child
from evap.metrics import left_in
from evap.siblings import ALL
from evap.snapshot import Snapshot, counted, merged, read_snapshot
from evap.tally import SIZE, Tally

PATIENCE_S: Final = 1.0
_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Asked:
    kind: str
    waiting: set[int]
    back: Callable[[bytes], None]
    asker: int | None
    timer: asyncio.TimerHandle
    answers: dict[int, bytes] = field(default_factory=dict)


class Questions:
    """own: the parent's own numbers for /metrics, if they are for a page."""

    def __init__(self, children: dict[int, Child], own: Callable[[bool], Snapshot]) -> None:
        self._children, self._own = children, own
        self._ids = count(1)
        self._open: dict[int, _Asked] = {}
        self._last: dict[int, Snapshot] = {}
        self.retired = Snapshot({}, {}, {})  #: what dead processes had counted

    def ask(
        self, kind: str, about: str, back: Callable[[bytes], None], asker: int | None = None, of: int = ALL
    ) -> None:
        """Ask all but the asker, or one; `back` is given what they say together."""
        id = next(self._ids)
        # Not one that is dead, and none that takes nothing: it would have to answer all of it one day.
        others = {n: c for n, c in self._children.items() if n != asker and of in (ALL, n) and c.pipe.takes}
        timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._enough, id)
        self._open[id] = _Asked(kind, set(others), back, asker, timer)
        for child in others.values():
            child.pipe.send(between.Question(id, kind, about))
        if not others:
            self._enough(id)

    def answered(self, child: Child, answer: between.Answer) -> None:
        asked = self._open.get(answer.id)
        if asked is None:  # too late
            return
        asked.answers[child.number] = answer.data
        if asked.kind == "metrics" and answer.data:
            self._last[child.number] = read_snapshot(answer.data)
        self._done(answer.id, asked, child.number)

    def gone(self, child: Child, lost: Snapshot) -> None:
        """It answers no more, and is no child any more. lost: what is to be added to what it had counted."""
        self.retired = merged([self.retired, counted(self._read(child)), lost])
        self._children.pop(child.number, None)  # before what waits for it is answered: it would be counted twice
        child.tally.close()
        self._last.pop(child.number, None)
        for id, asked in list(self._open.items()):
            self._done(id, asked, child.number)

    def _read(self, child: Child) -> Snapshot:
        """What one that does not answer has counted by now: its tally; of what is not in it, the last that is known."""
        copy = mmap.mmap(-1, SIZE)  # it may go on at any moment
        copy[:] = child.tally[:]
        left, last = left_in(Tally(copy)), self._last.get(child.number, Snapshot({}, {}, {}))
        return Snapshot(last.values | left.values, last.histograms | left.histograms, last.families)

    def _done(self, id: int, asked: _Asked, number: int) -> None:
        asked.waiting.discard(number)
        if not asked.waiting:
            self._enough(id)

    def _enough(self, id: int) -> None:
        asked = self._open.pop(id, None)
        if asked is not None:
            asked.timer.cancel()
            asked.back(self._together(asked))

    def _together(self, asked: _Asked) -> bytes:
        said = asked.answers.values()
        if asked.kind in ("usage", "block"):
            return next((data for data in said if data), b"")
        if asked.kind == "flush":
            return b"%d" % sum(int(data or 0) for data in said)
        answers = [self._last[number] for number in asked.answers if number in self._last]
        silent = [self._read(child) for n, child in self._children.items() if n not in (asked.asker, *asked.answers)]
        return _encode(merged([*answers, *silent, self.retired, self._own(asked.asker is not None)]))


def numbers(children: Sequence[Child]) -> Snapshot:
    """How many loop processes there are."""
    families = {"evap_loop_processes": ("gauge", "Loop processes that are up", "")}
    return Snapshot({"evap_loop_processes": {"": float(sum(c.up is not None for c in children))}}, {}, families)
