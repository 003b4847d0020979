"""The other processes of a server, as one of them sees them: what it may ask them, through the parent.

See `questions.py` for the kinds of questions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Final

from evap.identity import maker

#: Instead of a process's number.
ALL: Final = -1
NOBODY: Final = -2
#: id, kind, what about, of whom
Send = Callable[[int, str, str, int], None]


class Siblings:
    """number: our own, of `many`. send: a question to the parent. soon: call on the next pass of the loop."""

    def __init__(
        self, number: int, many: int, send: Send, soon: Callable[[Callable[[], None]], object]
    ) -> None:  # fmt: skip
        self.number, self._many, self._send, self._soon = number, many, send, soon
        self._asked: dict[int, Callable[[bytes], None]] = {}
        self._ids = count(1)
        self._alone = False

    def who_made(self, id: str) -> int:
        """Whom to ask about an exchange that is not known here: NOBODY if it can only have been our own."""
        number = maker(id)
        return number if 0 <= number < self._many and number != self.number else NOBODY

    def ask(self, kind: str, about: str, back: Callable[[bytes], None], of: int = ALL) -> None:
        """Ask one of them, or all; `back` is called once, later, with what they say together (or b"")."""
        if self._alone or of == NOBODY:
            self._soon(lambda: back(b""))
            return
        id = next(self._ids)
        self._asked[id] = back
        self._send(id, kind, about, of)

    def answered(self, id: int, data: bytes) -> None:
        self._asked.pop(id)(data)

    def parent_gone(self) -> None:
        """Nobody answers any more."""
        self._alone = True
        for id in list(self._asked):
            self._asked.pop(id)(b"")
