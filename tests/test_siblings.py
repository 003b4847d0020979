"""Whom one of several processes asks about an exchange, and what it hears when nobody is left."""

from __future__ import annotations

from evap.identity import Identity
from evap.siblings import ALL, NOBODY, Siblings


class One:
    def __init__(self, number: int, many: int) -> None:
        self.sent: list[tuple[int, str, str, int]] = []
        self.soon: list[object] = []
        self.heard: list[bytes] = []
        self.siblings = Siblings(number, many, lambda *question: self.sent.append(question), self._later)

    def _later(self, work: object) -> None:
        self.soon.append(work)

    def ask(self, of: int = ALL) -> None:
        self.siblings.ask("usage", "x", self.heard.append, of)


def test_an_id_says_who_made_it() -> None:
    it = One(1, 3)
    for number in range(64):
        id = f"chatcmpl-{Identity(number).new_id()}"
        assert len(id) == len("chatcmpl-") + 24
        assert it.siblings.who_made(id) == (number if number in (0, 2) else NOBODY)
    assert it.siblings.who_made("chatcmpl-none") == NOBODY
    assert it.siblings.who_made("") == NOBODY
    assert it.siblings.who_made("chatcmpl-" + "~" * 24) == NOBODY
    assert it.siblings.who_made("x" * 200_000 + id[:-24] + "A" * 24) == NOBODY  # no pipe has room for it


def test_each_question_is_answered_once() -> None:
    it = One(0, 3)
    it.ask()
    it.ask(2)
    assert [question[1:] for question in it.sent] == [("usage", "x", ALL), ("usage", "x", 2)]
    it.siblings.answered(it.sent[1][0], b"second")
    it.siblings.answered(it.sent[0][0], b"first")
    assert it.heard == [b"second", b"first"]


def test_nobody_knows_nothing_and_so_does_a_parent_that_is_gone() -> None:
    it = One(0, 3)
    it.ask(NOBODY)
    assert (it.sent, len(it.soon)) == ([], 1)
    it.ask(1)
    it.siblings.parent_gone()
    assert it.heard == [b""]
    it.ask(1)
    assert (len(it.sent), len(it.soon)) == (1, 2)
