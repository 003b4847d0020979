"""Who may wait, who is refused and how; counts that come out even whatever happens."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evap.admission import FULL, MAX_RETRY_AFTER_S, PUSHED, SHARE, Admission, Stage
from evap.errors import Overloaded, RateLimited

S = 1_000_000_000
T = TypeVar("T", bound=Hashable)


def join(line: Admission[T], item: T, flow: Hashable, level: int, tokens: int, n: int, stage: Stage) -> list[T]:
    """As the waiting room does it. Returns who was pushed out; the item has not come in if it still does not fit."""
    out = line.make_room(flow, tokens)
    if line.fits(tokens):
        line.join(item, flow, level, tokens, n, stage)
    return out


def filled(**flows: int) -> Admission[str]:
    """Room for as many requests as there are."""
    line = Admission[str](sum(flows.values()), 1000)
    for flow, count in flows.items():
        for number in range(count):
            assert not join(line, f"{flow}{number}", flow, 0, 1, 1, Stage.ENGINE)
    return line


def test_a_full_queue_refuses_whoever_fills_it() -> None:
    line = filled(a=5, b=2)
    with pytest.raises(RateLimited) as refused:
        line.check("a", 1, 0)
    assert (refused.value.code, refused.value.retry_after_s) == ("queue_share", 1.0)
    assert line.counts == {SHARE: 1}
    assert len(line) == 7


def test_who_has_less_waits_in_place_of_the_newest_of_the_longest() -> None:
    line = filled(a=5, b=2)
    line.check("b", 1, 0)
    assert join(line, "b2", "b", 0, 1, 1, Stage.ENGINE) == ["a4"]
    line.check("c", 1, 0)
    assert join(line, "c0", "c", 0, 1, 1, Stage.ENGINE) == ["a3"]
    assert line.counts == {PUSHED: 2}
    assert len(line) == 7
    with pytest.raises(RateLimited):  # a has 3, as b would have 4
        line.check("b", 1, 0)


def test_the_least_urgent_is_pushed_out_first() -> None:
    line = Admission[str](3, 100)
    for name, level in (("late", 7), ("soon", 0), ("newest", 3)):
        join(line, name, "a", level, 1, 1, Stage.ENGINE)
    assert join(line, "b", "b", 0, 1, 1, Stage.ENGINE) == ["late"]


def test_a_full_queue_of_equals_is_the_servers_fault() -> None:
    line = filled(a=1, b=1, c=1)
    with pytest.raises(Overloaded) as refused:
        line.check("d", 1, 0)
    assert refused.value.code == "queue_full"
    assert line.counts == {FULL: 1}


def test_tokens_are_a_limit_of_their_own_and_an_empty_queue_takes_any_size() -> None:
    line = Admission[str](100, 1000)
    line.check("a", 5000, 0)
    join(line, "a", "a", 0, 5000, 1, Stage.ENGINE)
    with pytest.raises(RateLimited):
        line.check("a", 1, 0)
    line.check("b", 1, 0)  # the giant is in the way of a small one of somebody else
    assert join(line, "b", "b", 0, 1, 1, Stage.ENGINE) == ["a"]
    assert line.tokens == 1


def test_a_large_request_pushes_out_as_many_small_ones_as_it_needs() -> None:
    line = Admission[int](100, 1000)
    for number in range(10):
        join(line, number, "a", 0, 100, 1, Stage.ENGINE)
    line.check("b", 300, 0)
    assert join(line, 99, "b", 0, 300, 1, Stage.ENGINE) == [9, 8, 7]
    assert line.tokens == 1000


def test_what_is_in_hand_counts_and_cannot_be_pushed_out() -> None:
    line = filled(a=3)
    assert line.take(Stage.ENGINE, 0) == "a0"
    line.check("b", 1, 0)
    assert join(line, "b0", "b", 0, 1, 1, Stage.ENGINE) == ["a2"]
    assert line.take(Stage.ENGINE, 0) in ("a1", "b0")
    with pytest.raises(Overloaded):
        line.check("c", 1, 0)
    line.put("a0", Stage.ENGINE)
    line.leave("a0")
    line.check("c", 1, 0)


def test_what_longer_shares_have_may_not_be_enough() -> None:
    """Then nobody comes in, or the limit would be none."""
    line = Admission[str](100, 1000)
    for flow in "ab":
        for number in range(10):
            join(line, f"{flow}{number}", flow, 0, 50, 1, Stage.ENGINE)
    line.check("c", 499, 0)
    out = join(line, "c", "c", 0, 499, 1, Stage.ENGINE)
    assert out == ["a9", "b9"]
    assert "c" not in line
    assert line.tokens == 900


def test_no_queue_at_all() -> None:
    line = Admission[str](0, 0)
    with pytest.raises(Overloaded):
        line.check("a", 1, 0)


def test_retry_after_follows_the_pace() -> None:
    line = filled(a=20)
    assert line.retry_after_s(0) == 1.0
    for second in range(1, 11):
        line.leave(line.take(Stage.ENGINE, second * S // 2))
    assert line.retry_after_s(5 * S) == pytest.approx(10 * 0.5)
    assert line.retry_after_s(500 * S) == MAX_RETRY_AFTER_S, "nothing has left for long"
    for item in line.items():
        line.leave(item)
    line.join("b", "b", 0, 1, 1, Stage.ENGINE)
    assert line.retry_after_s(900 * S) == 1.0, "an idle hour is no pace"


def test_a_wait_is_foretold_once_there_is_a_pace() -> None:
    line = filled(a=40)
    for second in range(1, 12):
        assert line.wait_ns("a", 0) == 0, "too few departures to judge by"
        line.leave(line.take(Stage.ENGINE, second * S))
    assert line.wait_ns("a", 0) == 29 * S
    assert line.wait_ns("b", 0) == 1 * S, "callers take turns"
    assert line.wait_ns("a", -1) == 0, "the more urgent goes first"
    for item in line.items():
        line.leave(item)
    line.join("b", "b", 0, 1, 1, Stage.ENGINE)
    assert line.wait_ns("b", 0) == 0, "an empty queue has no pace"


def test_a_new_priority_moves_a_request() -> None:
    line = filled(a=3)
    line.move("a2", -3)
    line.move("unknown", 0)
    assert [line.take(Stage.ENGINE, 0) for _ in range(3)] == ["a2", "a0", "a1"]
    line.move("a0", -1)  # in hand: it counts for the next stage
    line.put("a1", Stage.ENGINE)
    line.put("a0", Stage.ENGINE)
    assert line.take(Stage.ENGINE, 0) == "a0"


class Machine(RuleBasedStateMachine):
    """Requests come, are tokenized, submitted, cancelled, pushed out, in any order; a model keeps the books."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Admission[int](8, 100)
        self.stages: dict[int, Stage] = {}
        self.about: dict[int, tuple[int, int]] = {}  # flow, tokens
        self.left: set[int] = set()
        self.number = 0

    @rule(
        flow=st.integers(0, 3), level=st.integers(-2, 2), tokens=st.integers(0, 60), n=st.integers(1, 9),
        stage=st.sampled_from(Stage),
    )  # fmt: skip
    def arrive(self, flow: int, level: int, tokens: int, n: int, stage: Stage) -> None:
        waiting = self.mine(flow)
        try:
            self.line.check(flow, tokens, 0)
        except RateLimited:
            assert waiting, "429 says that the caller has something waiting"
            assert not self.fits(tokens)
            return
        except Overloaded:
            assert not waiting, "503 says that it is not the caller's fault"
            assert not self.fits(tokens)
            return
        fitted = self.fits(tokens)
        self.number += 1
        out = join(self.line, self.number, flow, level, tokens, n, stage)
        assert not (out and fitted), "nobody is pushed out of a queue with room"
        for gone in out:
            assert self.about[gone][0] != flow, "nobody pushes out his own"
            self.forget(gone)
        assert self.fits(tokens) == (self.number in self.line)
        if self.number in self.line:
            self.stages[self.number], self.about[self.number] = stage, (flow, tokens)
        else:
            assert out, "`check` said that somebody has more"

    def mine(self, flow: int) -> int:
        return sum(1 for item, where in self.stages.items() if self.about[item][0] == flow and where is not Stage.HAND)

    def fits(self, tokens: int) -> bool:
        used = sum(self.about[item][1] for item in self.stages)
        return len(self.stages) < 8 and (not self.stages or used + tokens <= 100)

    def forget(self, item: int) -> None:
        del self.stages[item]
        assert item not in self.left, "once"
        self.left.add(item)

    @rule(stage=st.sampled_from((Stage.PROMPTS, Stage.ENGINE)))
    def take(self, stage: Stage) -> None:
        there = {item for item, where in self.stages.items() if where is stage}
        assert self.line.waiting(stage) == len(there)
        if there:
            item = self.line.take(stage, 0)
            assert item in there
            self.stages[item] = Stage.HAND

    @precondition(lambda self: Stage.HAND in self.stages.values())
    @rule(data=st.data(), submit=st.booleans())
    def go_on(self, data: st.DataObject, submit: bool) -> None:
        item = data.draw(st.sampled_from([i for i, where in self.stages.items() if where is Stage.HAND]))
        if submit:
            assert self.line.leave(item)
            self.forget(item)
        else:
            self.line.put(item, Stage.ENGINE)
            self.stages[item] = Stage.ENGINE

    @precondition(lambda self: self.stages)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.stages)))
        assert self.line.leave(item)
        assert not self.line.leave(item)
        self.forget(item)

    @precondition(lambda self: self.stages)
    @rule(data=st.data(), level=st.integers(-2, 2))
    def move(self, data: st.DataObject, level: int) -> None:
        self.line.move(data.draw(st.sampled_from(sorted(self.stages))), level)

    @invariant()
    def the_books_agree(self) -> None:
        assert len(self.line) == len(self.stages)
        assert self.line.tokens == sum(self.about[item][1] for item in self.stages)
        assert set(self.line.items()) == set(self.stages)
        assert len(self.stages) <= 8
        assert self.line.tokens <= 100 or len(self.stages) == 1
        shares = self.line._shares
        assert [shares.count(flow) for flow in range(4)] == [self.mine(flow) for flow in range(4)]
        flow, weight = shares.longest()
        assert weight == max(shares.weight(flow) for flow in range(4))
        assert flow is None or weight == shares.weight(flow)

    def teardown(self) -> None:
        for item in list(self.stages):
            assert self.line.leave(item)
        assert not self.line.tokens
        assert not len(self.line._shares)
        assert not len(self.line)


TestMachine = Machine.TestCase
