"""What several processes say together, also when one of them says nothing, or is dead."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from evap import between, questions
from evap.questions import Questions
from evap.siblings import ALL
from evap.snapshot import Snapshot, read_snapshot
from evap.tally import SIZE, Tally
from tests.support import TIME_FACTOR


class FakeChild:
    """Keeps what it is asked."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.up: object = object()
        self.asked: list[between.Question] = []
        self.pipe = self
        self.takes = True
        self.tally = mmap.mmap(-1, SIZE)

    def count(self, tokens: int) -> None:
        """As the process does it, whether it answers or not."""
        Tally(self.tally).counts("tokens")["prompt"] = tokens

    def send(self, message: between.Question) -> None:
        self.asked.append(message)


def snapshot(count: float, gauge: float = 0.0) -> Snapshot:
    return Snapshot(
        {"evap_tokens": {"prompt": count}, "evap_connections": {"": gauge}}, {},
        {"evap_connections": ("gauge", "Open connections", "")},
    )  # fmt: skip


class Parent:
    def __init__(self, count: int = 3) -> None:
        self.children = {n: FakeChild(n) for n in range(count)}
        self.questions = Questions(self.children, lambda page: Snapshot({}, {}, {}))  # type: ignore[arg-type]
        self.said: list[bytes] = []
        self.heard_twice = asyncio.Event()

    def ask(self, kind: str, asker: int | None = 0, of: int = ALL) -> None:
        self.questions.ask(kind, "about", self._hear, asker, of)

    def _hear(self, data: bytes) -> None:
        self.said.append(data)
        if len(self.said) == 2:
            self.heard_twice.set()

    def answer(self, number: int, data: bytes | Snapshot) -> None:
        raw = msgspec.msgpack.encode(data) if isinstance(data, Snapshot) else data
        child = self.children[number]
        self.questions.answered(child, between.Answer(child.asked[-1].id, raw))  # type: ignore[arg-type]


def run(test: Callable[[Parent], Any]) -> None:
    async def main() -> None:
        result = test(Parent())
        if result is not None:
            await result

    asyncio.run(main())


def test_the_asker_is_not_asked_and_the_first_who_knows_is_heard() -> None:
    def test(it: Parent) -> None:
        it.ask("usage")
        assert [(len(c.asked)) for c in it.children.values()] == [0, 1, 1]
        assert (it.children[1].asked[0].kind, it.children[1].asked[0].about) == ("usage", "about")
        it.answer(1, b"")
        assert it.said == []
        it.answer(2, b"{}")
        assert it.said == [b"{}"]

    run(test)


def test_numbers_are_added_up() -> None:
    def test(it: Parent) -> None:
        it.ask("flush", asker=None)
        for n, data in enumerate((b"3", b"", b"4")):
            it.answer(n, data)
        assert it.said == [b"7"]

    run(test)


def test_what_a_dead_process_counted_stays_and_its_gauges_do_not() -> None:
    def test(it: Parent) -> None:
        it.ask("metrics", asker=None)
        for n in range(3):
            it.answer(n, snapshot(10.0**n, gauge=1.0))
        dead = it.children.pop(2)
        dead.count(100)
        it.questions.gone(dead, Snapshot({"evap_tokens": {"prompt": 0.5}}, {}, {}))  # type: ignore[arg-type]
        it.ask("metrics")
        it.answer(1, snapshot(20.0, gauge=1.0))
        total = read_snapshot(it.said[-1])
        assert total.values["evap_tokens"]["prompt"] == 120.5
        assert total.values["evap_connections"] == {"": 1.0}
        assert "evap_connections" not in it.questions.retired.values

    run(test)


def test_one_that_dies_is_not_waited_for() -> None:
    def test(it: Parent) -> None:
        it.ask("usage")
        it.answer(1, b"")
        it.questions.gone(it.children.pop(2), Snapshot({}, {}, {}))  # type: ignore[arg-type]
        assert it.said == [b""]

    run(test)


def test_who_waits_for_one_that_dies_is_told_its_numbers_once() -> None:
    def test(it: Parent) -> None:
        it.ask("metrics", asker=None)
        for n in (0, 1):
            it.answer(n, snapshot(1.0))
        dead = it.children[2]
        dead.count(100)
        it.questions.gone(dead, Snapshot({}, {}, {}))  # type: ignore[arg-type]
        assert read_snapshot(it.said[-1]).values["evap_tokens"]["prompt"] == 102.0
        assert 2 not in it.children
        assert dead.tally.closed, "its descriptor would stay until a cycle of objects is found"

    run(test)


def test_one_that_is_silent_is_waited_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "PATIENCE_S", 0.02)

    async def test(it: Parent) -> None:
        it.ask("metrics", asker=None)
        for n in range(3):
            it.answer(n, snapshot(1.0, gauge=1.0))
        it.children[2].count(10)
        it.ask("metrics")
        it.answer(1, snapshot(5.0, gauge=1.0))
        await asyncio.wait_for(it.heard_twice.wait(), 10 * TIME_FACTOR)
        total = read_snapshot(it.said[-1])
        assert total.values["evap_tokens"]["prompt"] == 15.0  # the silent one's as they are
        assert total.values["evap_connections"] == {"": 2.0}  # and its last known
        it.answer(2, snapshot(9.0))  # too late, and no harm
        assert len(it.said) == 2

    run(test)


def test_one_that_takes_nothing_is_asked_nothing_more() -> None:
    def test(it: Parent) -> None:
        it.children[2].takes = False
        it.children[2].count(10)
        it.ask("metrics")
        it.ask("block", of=2)
        assert it.children[2].asked == []
        it.answer(1, snapshot(5.0))
        assert it.said[0] == b""
        assert read_snapshot(it.said[1]).values["evap_tokens"]["prompt"] == 15.0

    run(test)


def test_one_may_be_asked_and_is_not_waited_for_when_it_is_not_there() -> None:
    def test(it: Parent) -> None:
        it.ask("block", of=2)
        assert [len(c.asked) for c in it.children.values()] == [0, 0, 1]
        it.answer(2, b"piece")
        it.ask("block", of=7)
        it.ask("block", of=2)
        it.questions.gone(it.children.pop(2), Snapshot({}, {}, {}))  # type: ignore[arg-type]
        assert it.said == [b"piece", b"", b""]

    run(test)


def test_alone_there_is_nobody_to_ask() -> None:
    async def main() -> None:
        it = Parent(1)
        it.ask("usage")
        assert it.said == [b""]

    asyncio.run(main())
