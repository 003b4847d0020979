"""The order in which requests leave: nobody is lost, nobody goes twice, nobody waits for more than his turn."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evap.fair_queue import MOST, OVERTAKE, FairQueue
from evap.turns import Turns


def everything(queue: FairQueue[int]) -> list[int]:
    return [queue.pop() for _ in range(len(queue))]


def test_one_flow_is_first_come_first_served() -> None:
    queue = FairQueue[int]()
    for number in range(10):
        queue.push(number, "a", 0, cost=number % 3 + 1)
    assert everything(queue) == list(range(10))
    with pytest.raises(IndexError):
        queue.pop()


def test_a_single_request_waits_for_one_of_a_thousand() -> None:
    queue = FairQueue[int]()
    for number in range(1000):
        queue.push(number, "hog", 0, cost=1 + number % 5)
    for _ in range(10):
        queue.pop()
    queue.push(-1, "other", 0)
    assert -1 in [queue.pop() for _ in range(2)]


def test_a_request_of_many_choices_misses_as_many_turns() -> None:
    queue = FairQueue[str]()
    for number in range(8):
        queue.push(f"wide {number}", "wide", 0, cost=4)
    for number in range(32):
        queue.push(f"plain {number}", "plain", 0)
    order = [queue.pop() for _ in range(10)]
    assert [name.split()[0] for name in order] == ["wide", *["plain"] * 4, "wide", *["plain"] * 4]


def test_who_leaves_the_ring_for_a_moment_still_pays() -> None:
    """A flow with one wide request at a time is no better off than one that queues them all."""
    queue = FairQueue[int]()
    for number in range(100):
        queue.push(number, "plain", 0)
    queue.push(1000, "wide", 0, cost=10)
    served = 0
    for _ in range(40):
        entry = queue.pop()
        if entry >= 1000:
            served += 1
            queue.push(1000 + served, "wide", 0, cost=10)
    assert served == 4


def test_urgency_goes_first_and_nobody_starves() -> None:
    queue = FairQueue[int]()
    for number in range(100):
        queue.push(number, "a", 3)
        queue.push(1000 + number, "b", 0)
    order = everything(queue)
    late = [place for place, entry in enumerate(order) if entry < 1000]
    assert late[:3] == [OVERTAKE, 2 * OVERTAKE + 1, 3 * OVERTAKE + 2]
    assert [entry for entry in order if entry < 1000] == list(range(100))


def test_a_turn_without_rivals_is_a_turn() -> None:
    queue = FairQueue[int]()
    for number in range(3):
        queue.push(number, "a", 3)
    for number in range(OVERTAKE - 1):
        queue.push(1000 + number, "b", 0)
    assert [queue.pop() for _ in range(OVERTAKE)] == [*range(1000, 1000 + OVERTAKE - 1), 0]
    for number in range(OVERTAKE):
        queue.push(2000 + number, "b", 0)
    assert [queue.pop() for _ in range(OVERTAKE + 1)] == [*range(2000, 2000 + OVERTAKE), 1]


def test_remove_and_level() -> None:
    queue = FairQueue[int]()
    for number in range(5):
        queue.push(number, "a", number % 2)
    assert queue.level(3) == 1
    assert queue.remove(3)
    assert not queue.remove(3)
    assert 3 not in queue
    assert everything(queue) == [0, 2, 4, 1]
    assert not queue._levels
    with pytest.raises(KeyError):
        queue.level(3)


def test_an_entry_waits_once() -> None:
    queue = FairQueue[int]()
    queue.push(1, "a", 0)
    with pytest.raises(ValueError, match="already"):
        queue.push(1, "b", 2)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(20, 120))
def test_backlogged_flows_get_equal_shares(costs: list[int], pops: int) -> None:
    """Flow i has entries of costs[i] without end: what they were served differs by the largest cost at most."""
    queue = FairQueue[tuple[int, int]]()
    for flow, cost in enumerate(costs):
        for number in range(pops):
            queue.push((flow, number), flow, 0, cost)
    served = Counter[int]()
    for _ in range(pops):
        flow, _ = queue.pop()
        served[flow] += costs[flow]
        assert max(served.values()) - min(served[f] for f in range(len(costs))) <= max(costs) + 1


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30), st.integers(0, 8), st.integers(0, 5)
)  # fmt: skip
def test_who_goes_before_a_newcomer_is_known(waiting: list[tuple[int, int]], gone: int, flow: int) -> None:
    """Exactly for a flow that is new; for one that waits, its place in the round is worth one entry of each other."""
    queue = FairQueue[int]()
    for number, (other, cost) in enumerate(waiting):
        queue.push(number, other, 0, cost)
    queue.push(100, "somebody", 1)
    for _ in range(min(gone, len(waiting))):
        queue.pop()
    assert queue.ahead(flow, 5) == 0
    said, new = queue.ahead(flow, 0), flow not in (other for other, _ in waiting)
    queue.push(-1, flow, 0)
    before = [entry for entry in everything(queue) if entry != 100].index(-1)
    assert before <= said <= before + (0 if new else 5)


class Machine(RuleBasedStateMachine):
    """Against the plainest model: sets of what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue[int]()
        self.waiting: dict[int, tuple[int, int]] = {}  # entry -> flow, level
        self.number = 0
        self.passed: dict[int, int] = defaultdict(int)  # level -> pops of more urgent ones while it waits

    @rule(flow=st.integers(0, 4), level=st.integers(-3, 3), cost=st.integers(0, 50))
    def push(self, flow: int, level: int, cost: int) -> None:
        self.number += 1
        self.queue.push(self.number, flow, level, cost)
        self.waiting[self.number] = flow, level

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        entry = self.queue.pop()
        flow, level = self.waiting.pop(entry)
        older = [e for e, where in self.waiting.items() if where == (flow, level) and e < entry]
        assert not older, "first come first served within a flow"
        levels = {where[1] for where in self.waiting.values()}
        if not all(level <= other for other in levels):
            assert self.passed[level] >= OVERTAKE, "only one that has waited long enough goes before a more urgent one"
        self.passed[level] = 0
        for other in levels:
            if other > level:
                self.passed[other] += 1
            assert self.passed[other] <= 2 * OVERTAKE + len(levels)
        for gone in set(self.passed) - levels:
            del self.passed[gone]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(entry)
        _, level = self.waiting.pop(entry)
        if all(where[1] != level for where in self.waiting.values()):
            self.passed.pop(level, None)

    @invariant()
    def the_same_wait(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert all(entry in self.queue for entry in self.waiting)

    def teardown(self) -> None:
        left = {self.queue.pop() for _ in range(len(self.waiting))}
        assert left == set(self.waiting), "nobody is lost, nobody goes twice"
        assert not self.queue._levels
        assert not self.queue._order


TestMachine = Machine.TestCase


def two(waiting: dict[str, tuple[int, int]], pops: int) -> Counter[str]:
    """Two processes that serve in turn. waiting: flow -> how many in each. What was served of each."""
    memory = memoryview(bytearray(Turns.size(2)))
    turns = [Turns(memory, process=n, processes=2) for n in range(2)]
    queues = [FairQueue[tuple[str, int]]() for _ in range(2)]
    for queue, of in zip(queues, turns, strict=True):
        queue.elsewhere = of.served_elsewhere
    for flow, counts in waiting.items():
        for queue, many in zip(queues, counts, strict=True):
            for number in range(many):
                queue.push((flow, number), flow, 0)
    served: Counter[str] = Counter()
    for pop in range(pops):
        place = pop % 2 if queues[pop % 2] else 1 - pop % 2
        flow, _ = queues[place].pop()
        turns[place].serve(flow, 1)
        served[flow] += 1
    return served


def test_who_is_served_in_two_processes_has_no_more_than_who_is_served_in_one() -> None:
    assert two({"hog": (100, 100), "one": (60, 0)}, 100)["one"] >= 49
    assert two({"hog": (100, 100), "one": (0, 60), "other": (60, 0)}, 99)["hog"] <= 36


def test_nobody_waits_for_what_the_others_do_not_want() -> None:
    assert two({"hog": (10, 10)}, 20) == {"hog": 20}
    assert two({"hog": (50, 50), "one": (5, 0)}, 105) == {"hog": 100, "one": 5}


def test_who_owes_much_elsewhere_is_served_all_the_same() -> None:
    """Whose row is another's, too (by chance), waits for MOST turns at a time, not for ever."""
    queue = FairQueue[int]()
    given = iter(range(0, 1 << 30, 1000))
    queue.elsewhere = lambda flow: next(given) if flow == "unlucky" else 0
    queue.push(-1, "unlucky", 0)
    for number in range(10 * MOST):
        queue.push(number, "lucky", 0)
    popped: list[int] = []
    queue.elsewhere = lambda flow: 1000 * (flow == "unlucky")
    while -1 not in popped:
        popped.append(queue.pop())
    assert len(popped) <= MOST + 2
