"""What is kept of pushes: bounded, for a while, for one key, whole or not at all."""

from __future__ import annotations

import pytest

from evap.blocks import MANY_WAITING, OVERHEAD, Block, BlockStore
from evap.errors import EvapError, NotFound
from tests.fakes import FakeCore, FakeReply


class Shelf:
    def __init__(self, limit: int = 1 << 20) -> None:
        self.now_ns = 0
        self.store = BlockStore(limit=limit, keep_ns=60, now_ns=lambda: self.now_ns)
        self.answers: list[bytes | EvapError] = []

    def put(self, path: str, *parts: bytes, key: str = "k") -> Block:
        block = self.store.open(path, key)
        for part in parts:
            block.add(part)
        block.close(True)
        return block

    def ask(self, path: str, key: str = "k") -> FakeReply:
        reply = FakeReply(FakeCore(), 1)
        self.store.fetch(path, key, reply, lambda _, body: self.answers.append(body))
        return reply


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_kept_for_its_time(shelf: Shelf) -> None:
    shelf.put("/a", b"one", b"two")
    shelf.now_ns = 59
    shelf.ask("/a")
    assert shelf.answers == [b"onetwo"]
    shelf.now_ns = 60
    with pytest.raises(NotFound):
        shelf.ask("/a")
    assert shelf.store.size == 0


@pytest.mark.parametrize(("path", "key"), [("/a", "another"), ("/a", ""), ("/b", "k")])
def test_only_that_path_and_that_key(shelf: Shelf, path: str, key: str) -> None:
    shelf.put("/a", b"x")
    with pytest.raises(NotFound):
        shelf.ask(path, key)


def test_requests_wait_for_the_end(shelf: Shelf) -> None:
    block = shelf.store.open("/a", "k")
    block.add(b"1")
    shelf.ask("/a")
    shelf.ask("/a")
    assert shelf.answers == []
    block.add(b"2")
    block.close(True)
    assert shelf.answers == [b"12", b"12"]


def test_a_block_that_breaks_off_is_gone(shelf: Shelf) -> None:
    block = shelf.store.open("/a", "k")
    block.add(b"1")
    shelf.ask("/a")
    block.close(False)
    assert [type(a) for a in shelf.answers] == [NotFound]
    assert shelf.store.size == 0
    with pytest.raises(NotFound):
        shelf.ask("/a")


def test_the_oldest_make_room() -> None:
    shelf = Shelf(limit=3 * (OVERHEAD + 100))
    for path in ("/a", "/b", "/c", "/d"):
        shelf.put(path, bytes(100))
    with pytest.raises(NotFound):
        shelf.ask("/a")
    for path in ("/b", "/c", "/d"):
        shelf.ask(path)
    assert shelf.answers == [bytes(100)] * 3
    assert shelf.store.size == 3 * (OVERHEAD + 100)


def test_a_block_that_is_too_large_is_not_kept() -> None:
    shelf = Shelf(limit=OVERHEAD + 100)
    block = shelf.store.open("/a", "k")
    block.add(bytes(60))
    shelf.ask("/a")
    block.add(bytes(60))
    assert [type(a) for a in shelf.answers] == [NotFound]
    block.add(bytes(60))
    block.close(True)
    assert shelf.store.size == 0


@pytest.mark.parametrize("limit", [0, OVERHEAD - 1])
def test_nothing_is_kept_without_memory(limit: int) -> None:
    shelf = Shelf(limit=limit)
    shelf.put("/a", b"x")
    with pytest.raises(NotFound):
        shelf.ask("/a")
    assert shelf.store.size == 0


def test_who_left_waits_no_more(shelf: Shelf) -> None:
    block = shelf.store.open("/a", "k")
    for _ in range(10 * MANY_WAITING):
        shelf.ask("/a").abort()
    assert len(block._waiting) <= MANY_WAITING
    shelf.ask("/a")
    block.close(True)
    assert len(shelf.answers) <= MANY_WAITING + 1
