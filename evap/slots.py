"""The slot table: which generation runs where. A slot is reused only after the engine has said it is done with it."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from evap.arrays import every
from evap.messages import Int32

Owner = TypeVar("Owner")

GENERATIONS = 1 << 16


class SlotTable(Generic[Owner]):
    """Slots 0..size-1 with a generation number each, which makes late records of an earlier user harmless.

    A freed slot goes to the end of the queue, so that its generation numbers wrap as late as possible: a stale record
    could be mistaken only after 65,536 uses of one slot.
    """

    def __init__(self, size: int) -> None:
        if not 0 < size <= 1 << 16:
            raise ValueError("a slot is a 16-bit number")
        self.size = size
        #: int32, shape (size,): the generation of the slot's present (or next) user
        self.generation: Int32 = np.zeros(size, np.int32)
        self.owner: list[Owner | None] = [None] * size
        self._changes = 0  # of `generation`
        #: slots that were all found fresh, at that number of changes
        self._known: tuple[Int32 | None, int] = (None, 0)
        self._free = deque(range(size))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, owner: Owner) -> tuple[int, int]:
        """(slot, generation). Raises IndexError when none is free; ask `free` first."""
        if not self._free:
            raise IndexError("no slot is free")
        slot = self._free.popleft()
        self.owner[slot] = owner
        return slot, int(self.generation[slot])

    def give_back(self, slot: int) -> None:
        """The engine has confirmed the end of this slot's generation."""
        if self.owner[slot] is None:
            raise ValueError(f"slot {slot} is already free")
        self.owner[slot] = None
        self.generation[slot] = (int(self.generation[slot]) + 1) % GENERATIONS
        self._changes += 1
        self._free.append(slot)

    def fresh(self, slots: Int32, generations: Int32) -> npt.NDArray[np.bool_] | None:
        """Which records are of a slot's present user; None: all. Arrays that nobody can write to are looked at once:
        the same array of slots, while no slot was given back, has the same generations."""
        if slots is self._known[0] and self._changes == self._known[1]:
            return None
        found: npt.NDArray[np.bool_] = self.generation[slots] == generations
        if not every(found):
            return found
        if not slots.flags.writeable:
            self._known = slots, self._changes
        return None
