"""Blocks that another process keeps: whole, for its key only, for as long as there, and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evap import copies
from evap.blocks import OVERHEAD, Block, BlockStore
from evap.copies import AGAIN_S, PIECE_BYTES, Copies
from evap.errors import EvapError, NotFound, Overloaded
from evap.siblings import Siblings
from tests.fakes import FakeCore, FakeLoop, FakeReply

KEEP_S = 60


def path(number: int = 1, name: str = "b") -> str:
    """Of a block of an exchange that process A, B, ... made."""
    return f"/v1/chat/completions/chatcmpl-{'AB'[number]}{name * 23}/blocks/0"


class Two:
    """Process 0 is asked for what process 1 keeps. dead: nobody answers."""

    def __init__(self, limit: int = 1 << 20, theirs: int = 1 << 24) -> None:
        self.loop = FakeLoop()
        clock = lambda: int(self.loop.now * 1e9)  # noqa: E731
        self.own = BlockStore(limit=limit, keep_ns=KEEP_S * 10**9, now_ns=clock)
        self.other = BlockStore(limit=theirs, keep_ns=KEEP_S * 10**9, now_ns=clock)
        self.siblings = Siblings(0, 2, self._carry, self.loop.call_soon)
        self.copies = Copies(self.own, self.siblings, self.loop.call_later)
        self.questions = 0
        self.dead = False
        self.answers: list[bytes | EvapError] = []

    def _carry(self, id: int, kind: str, about: str, of: int) -> None:
        assert (kind, of) == ("block", 1)
        self.questions += 1
        answer: Callable[[], bytes] = lambda: b"" if self.dead else copies.answer(self.other, about)  # noqa: E731
        self.loop.call_soon(lambda: self.siblings.answered(id, answer()))

    def put(self, body: bytes, name: str = "b", key: str = "k") -> Block:
        block = self.other.open(path(1, name), key)
        block.add(body)
        block.close(True)
        return block

    def ask(self, where: str, key: str = "k") -> FakeReply:
        reply = FakeReply(FakeCore(), 1)
        self.copies.fetch(where, key, reply, lambda _, body: self.answers.append(body))
        return reply

    def fetch(self, where: str, key: str = "k") -> bytes | EvapError:
        self.ask(where, key)
        self.loop.run(AGAIN_S)
        return self.answers[-1]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7])
def test_it_comes_whole_and_once(size: int) -> None:
    it = Two()
    body = bytes(i % 251 for i in range(size))
    it.put(body)
    assert it.fetch(path()) == body
    asked = it.questions
    assert asked == max(1, -(-size // PIECE_BYTES))
    assert it.fetch(path()) == body
    assert it.questions == asked


def test_our_own_are_not_asked_for() -> None:
    it = Two()
    block = it.own.open(path(0), "k")
    block.add(b"x")
    block.close(True)
    assert it.fetch(path(0)) == b"x"
    with pytest.raises(NotFound):
        it.ask(path(0, "c"))
    assert it.questions == 0


def test_it_is_kept_as_long_as_the_original() -> None:
    it = Two()
    it.put(b"x")
    it.loop.run(KEEP_S - 10)
    assert it.fetch(path()) == b"x"
    it.loop.run(10)
    assert isinstance(it.fetch(path()), NotFound)
    assert it.own.size == 0


def test_another_key_gets_nothing_and_spoils_nothing() -> None:
    it = Two()
    it.put(b"x")
    it.ask(path(), "thief")
    it.ask(path())
    it.loop.run(AGAIN_S)
    assert sorted(map(type, it.answers), key=str) == [bytes, NotFound]
    assert isinstance(it.fetch(path(), ""), NotFound)
    assert it.fetch(path()) == b"x"


def test_a_block_that_grows_is_waited_for() -> None:
    it = Two()
    block = it.other.open(path(), "k")
    block.add(b"1")
    for _ in range(3):
        it.ask(path())
    it.loop.run(4 * AGAIN_S)
    assert (it.answers, it.questions) == ([], 5)
    block.add(b"2")
    block.close(True)
    it.loop.run(2 * AGAIN_S)
    assert it.answers == [b"12"] * 3


def test_a_block_that_breaks_off_meanwhile_is_not_there() -> None:
    it = Two()
    block = it.other.open(path(), "k")
    it.ask(path())
    it.loop.run(AGAIN_S)
    block.close(False)
    it.loop.run(2 * AGAIN_S)
    assert [type(a) for a in it.answers] == [NotFound]
    assert it.own.size == 0


def test_who_leaves_ends_the_asking() -> None:
    it = Two()
    it.other.open(path(), "k")
    it.ask(path()).abort()
    it.loop.run(100 * AGAIN_S)
    assert it.questions <= 2
    assert it.own.find(f"{path()} k", "k") is None


def test_a_maker_that_dies_between_two_pieces() -> None:
    it = Two()
    it.put(bytes(3 * PIECE_BYTES))
    it.ask(path())
    it.loop.run(0, calls=1)
    it.dead = True
    it.loop.run(1)
    assert [type(a) for a in it.answers] == [NotFound]
    assert it.own.size == 0


def test_copies_take_half_of_the_memory_until_they_expire_and_what_was_made_here_makes_room() -> None:
    it = Two(limit=8 * (OVERHEAD + 1000))
    for n in range(8):
        own = it.own.open(path(0, str(n)), "k")
        own.add(bytes(1000))
        own.close(True)
    for name in "abcdef":
        it.put(bytes(1000), name)
    got = [it.fetch(path(1, name)) for name in "abcdef"]
    assert [type(a) for a in got] == [bytes] * 4 + [Overloaded] * 2
    assert it.own.size == 8 * (OVERHEAD + 1000)
    assert it.fetch(path(0, "7")) == bytes(1000)  # the newest of our own
    it.loop.run(KEEP_S)
    assert isinstance(it.fetch(path(1, "a")), NotFound)
    assert it.own.size == 0
    it.put(bytes(7000), "z")
    assert it.fetch(path(1, "z")) == bytes(7000)  # alone it may take all


def test_what_grows_here_is_not_pushed_out_by_a_copy() -> None:
    it = Two(limit=3 * (OVERHEAD + 1000))
    growing = [it.own.open(path(0, str(n)), "k") for n in range(2)]
    for block in growing:
        block.add(bytes(1500))
    it.put(bytes(1500), "b")
    assert isinstance(it.fetch(path()), Overloaded)
    for block in growing:
        block.close(True)
    assert it.fetch(path(0, "1")) == bytes(1500)
    assert it.fetch(path()) == bytes(1500)
