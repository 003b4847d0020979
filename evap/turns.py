"""What several processes that share a server's places give to whom: they take turns among callers as one would.

    by process: generations that it has in the engine | turns that it has given to each caller, by row, int64

A process writes its own part only, and reads the others'; nothing is locked, and a number that is a moment old does
no harm. A caller's row is a keyed hash: nobody can choose whose he shares. Two that share one by chance owe each
other's turns, up to MOST at a time (`fair_queue.py`), so that neither starves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Final

ROWS: Final = 4096
_LENGTH: Final = ROWS + 1  # numbers of a process


class Turns:
    """memory: `size(processes)` bytes, zeroed at first. one_engine: the places in it are everybody's."""

    def __init__(
        self, memory: memoryview, *, process: int, processes: int, secret: bytes = b"", one_engine: bool = True
    ) -> None:
        self._numbers = memory.cast("q")
        self._secret, self._one_engine = secret, one_engine
        self.processes = processes
        self._own = process * _LENGTH
        self._others = [n * _LENGTH for n in range(processes) if n != process]
        self._rows: dict[Hashable, int] = {}

    @staticmethod
    def size(processes: int) -> int:
        return 8 * processes * _LENGTH

    def hold(self, generations: int) -> None:
        """So many of ours are in the engine."""
        self._numbers[self._own] = generations

    def held_elsewhere(self) -> int:
        numbers = self._numbers
        return sum([numbers[at] for at in self._others]) if self._one_engine else 0

    def serve(self, flow: Hashable, turns: int) -> None:
        """A caller has been given so many turns here."""
        self._numbers[self._own + self._row(flow)] += turns

    def served_elsewhere(self, flow: Hashable) -> int:
        """All that the others have ever given to him; 0 for whom they cannot know (a connection)."""
        if not isinstance(flow, str):
            return 0
        row, numbers = self._row(flow), self._numbers
        return sum([numbers[at + row] for at in self._others])

    def bury(self) -> None:
        """We are the place of a process that has died: it holds nothing any more."""
        self._numbers[self._own] = 0

    def _row(self, flow: Hashable) -> int:
        row = self._rows.get(flow)
        if row is None:
            if len(self._rows) >= ROWS:
                self._rows.clear()
            name = hashlib.blake2b(repr(flow).encode(), key=self._secret[:64], digest_size=4).digest()
            row = self._rows[flow] = 1 + int.from_bytes(name, "little") % ROWS
        return row
