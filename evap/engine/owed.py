"""What an engine still owes: the rule "exactly one final record per slot" outlives the engine's process here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from evap.messages import FINISH_MASK, NO_TOKEN, Finish, TokenBatch

#: Slots are 16 bits in the ring.
SLOTS: Final = 1 << 16


class SlotLedger:
    """Which slots an engine still owes a final record, and which index comes next. Arrays, no object a token."""

    def __init__(self) -> None:
        self._live = np.zeros(SLOTS, np.bool_)
        self._generation = np.zeros(SLOTS, np.int32)
        self._next = np.zeros(SLOTS, np.int32)

    def open(self, slot: int, generation: int) -> None:
        self._live[slot] = True
        self._generation[slot] = generation
        self._next[slot] = 0

    def owes(self, slot: int, generation: int) -> bool:
        return bool(self._live[slot]) and int(self._generation[slot]) == generation

    def note(self, batch: TokenBatch) -> None:
        """Take in records: the last one of a slot counts, so plain assignment in order is right."""
        has_token = (batch.flags & NO_TOKEN) == 0
        self._next[batch.slot[has_token]] = batch.index[has_token] + 1
        self._live[batch.slot[(batch.flags & FINISH_MASK) != 0]] = False

    def fail(self, slots: Sequence[int] | None = None) -> TokenBatch | None:
        """Final ERROR records for `slots`, or for all that are owed one; they are then settled. None: nothing owed."""
        owed = np.flatnonzero(self._live) if slots is None else np.asarray(slots)
        if not len(owed):
            return None
        self._live[owed] = False
        flags = np.full(len(owed), Finish.ERROR | NO_TOKEN, np.uint8)
        token = np.zeros(len(owed), np.int32)
        return TokenBatch(owed.astype(np.int32), self._generation[owed], token, self._next[owed], flags)
