"""A process's counters in memory that outlives it: whoever maps it reads what they were at the last store.

    0       how many counts there are, int64
    CELLS   their values, int64
    NAMES   their names, `family\\0label`, 96 bytes each
    SHAPES  histograms (see `SharedHistogram`), in the order in which they are asked for

A count exists once its name is written and their number is raised, so that a kill at any moment leaves whole numbers.
`Plain` is the same without memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from evap.histogram import Histogram, SharedHistogram

SIZE: Final = 1 << 19
CELLS: Final = 64
NAMES: Final = 1 << 12
SHAPES: Final = 1 << 16
_MAX: Final = (NAMES - CELLS) // 8
_NAME: Final = 96
_FIRST: Final = CELLS // 8
_NOWHERE: Final = 1


class Numbers(Protocol):
    def counts(self, family: str, labels: Iterable[str] = ()) -> dict[str, int]:
        """Label -> number, to be changed by assignment to a label. labels: those that are there from the start."""
        ...

    def histogram(self, bounds: Sequence[float]) -> Histogram: ...


class Plain:
    """Numbers that end with the process."""

    def counts(self, family: str, labels: Iterable[str] = ()) -> dict[str, int]:
        return dict.fromkeys(labels, 0)

    def histogram(self, bounds: Sequence[float]) -> Histogram:
        return Histogram(bounds)


class Tally:
    """memory: SIZE bytes, zeroed or written by another one. It has one writer; a reader asks for the same in the same
    order, and finds what there is as of now."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.cells = memoryview(memory)[:NAMES].cast("q")
        self._next = SHAPES

    def counts(self, family: str, labels: Iterable[str] = ()) -> dict[str, int]:
        found = Counts(self, family)
        for place in range(self.cells[0]):
            name, _, label = self._name(place).partition("\0")
            if name == family:
                found.know(label, _FIRST + place)
        for label in labels:
            if label not in found:
                found[label] = 0
        return found

    def histogram(self, bounds: Sequence[float]) -> Histogram:
        size = SharedHistogram.size(len(bounds))
        at, self._next = self._next, self._next + size
        return SharedHistogram(bounds, memoryview(self._memory)[at : at + size])

    def enter(self, name: str, value: int) -> int:
        """A new count: where its value is in `cells`. All that there is no room for share one, which nobody reads."""
        place = self.cells[0]
        data = name.encode()
        if place >= _MAX or len(data) > _NAME:
            return _NOWHERE
        at = NAMES + place * _NAME
        self._memory[at : at + _NAME] = data.ljust(_NAME, b"\0")
        self.cells[_FIRST + place] = value
        self.cells[0] = place + 1
        return _FIRST + place

    def _name(self, place: int) -> str:
        at = NAMES + place * _NAME
        return self._memory[at : at + _NAME].rstrip(b"\0").decode()


class Counts(dict[str, int]):
    """A dictionary whose values are stored in a Tally as well."""

    __slots__ = ("_cells", "_family", "_places", "_tally")

    def __init__(self, tally: Tally, family: str) -> None:
        super().__init__()
        self._tally, self._family = tally, family
        self._cells = tally.cells
        self._places: dict[str, int] = {}

    def know(self, label: str, place: int) -> None:
        """It is in the Tally already."""
        super().__setitem__(label, self._cells[place])
        self._places[label] = place

    def __setitem__(self, label: str, value: int, _set: Any = dict.__setitem__) -> None:
        _set(self, label, value)
        try:
            self._cells[self._places[label]] = value
        except KeyError:
            self._places[label] = self._tally.enter(f"{self._family}\0{label}", value)
