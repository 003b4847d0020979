"""Deadlines: once, in order, never early; and memory that does not follow the number of requests."""

from __future__ import annotations

import weakref

from hypothesis import given
from hypothesis import strategies as st

from evap.timing import MIN_STALE, Deadlines
from tests.fakes import FakeLoop


def made() -> tuple[FakeLoop, Deadlines[int], list[tuple[int, float]]]:
    loop, seen = FakeLoop(), list[tuple[int, float]]()
    return loop, Deadlines(lambda: round(loop.now * 1e9), loop.call_later, lambda i: seen.append((i, loop.now))), seen


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=40))
def test_each_expires_once_in_order_and_not_early(given: list[tuple[int, bool]]) -> None:
    loop, deadlines, seen = made()
    start = loop.now
    for number, (ms, _) in enumerate(given):
        deadlines.add(number, round((start + ms / 1e3) * 1e9))
    for number, (_, removed) in enumerate(given):
        if removed:
            deadlines.remove(number)
    loop.run()
    kept = {number: ms for number, (ms, removed) in enumerate(given) if not removed}
    assert sorted(number for number, _ in seen) == sorted(kept)
    assert all(kept[number] / 1e3 <= at - start + 1e-6 <= kept[number] / 1e3 + 0.002 for number, at in seen)
    assert not len(deadlines)


def test_an_earlier_deadline_moves_the_timer() -> None:
    loop, deadlines, seen = made()
    deadlines.add(1, round((loop.now + 10) * 1e9))
    deadlines.add(2, round((loop.now + 1) * 1e9))
    loop.run(1.1)
    assert [number for number, _ in seen] == [2]
    loop.run(10)
    assert [number for number, _ in seen] == [2, 1]


def test_what_is_over_is_forgotten_long_before_its_time() -> None:
    loop, deadlines, _ = made()
    for number in range(10_000):
        deadlines.add(number, round((loop.now + 86_400) * 1e9))
        deadlines.remove(number)
    deadlines.remove(-1)
    assert len(deadlines._heap) <= MIN_STALE + 1


def test_what_is_removed_is_free_at_once() -> None:
    class Item:
        pass

    loop, seen = FakeLoop(), list[Item]()
    deadlines = Deadlines[Item](lambda: round(loop.now * 1e9), loop.call_later, seen.append)
    item = Item()
    gone = weakref.ref(item)
    deadlines.add(item, round((loop.now + 86_400) * 1e9))
    deadlines.remove(item)
    del item
    assert gone() is None


def test_a_second_deadline_replaces_the_first() -> None:
    loop, deadlines, seen = made()
    deadlines.add(1, round((loop.now + 1) * 1e9))
    deadlines.add(1, round((loop.now + 5) * 1e9))
    loop.run(2)
    assert seen == []
    loop.run(4)
    assert [number for number, _ in seen] == [1]
