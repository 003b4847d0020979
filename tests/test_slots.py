"""The slot table: a slot is handed out once, and its generation tells its users apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from evap.slots import GENERATIONS, SlotTable


class Machine(RuleBasedStateMachine):
    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.table: SlotTable[object] = SlotTable(4)
        self.live: dict[int, object] = {}
        self.seen: set[tuple[int, int]] = set()

    @precondition(lambda self: self.table.free)
    @rule(target=taken)
    def take(self) -> int:
        owner = object()
        slot, generation = self.table.take(owner)
        assert slot not in self.live
        assert (slot, generation) not in self.seen, "a generation is used once"
        self.seen.add((slot, generation))
        self.live[slot] = owner
        return slot

    @rule(slot=consumes(taken))
    def give_back(self, slot: int) -> None:
        self.table.give_back(slot)
        del self.live[slot]

    @invariant()
    def owners(self) -> None:
        assert {s: o for s, o in enumerate(self.table.owner) if o is not None} == self.live
        assert self.table.free == 4 - len(self.live)


TestMachine = Machine.TestCase


def test_none_left() -> None:
    table: SlotTable[str] = SlotTable(1)
    slot, _ = table.take("a")
    with pytest.raises(IndexError):
        table.take("b")
    table.give_back(slot)
    with pytest.raises(ValueError, match="already free"):
        table.give_back(slot)


def test_generations_wrap_at_16_bits() -> None:
    table: SlotTable[str] = SlotTable(1)
    table.generation[0] = GENERATIONS - 1
    assert table.take("a") == (0, GENERATIONS - 1)
    table.give_back(0)
    assert table.take("b") == (0, 0)


def test_freed_slots_wait_their_turn() -> None:
    table: SlotTable[str] = SlotTable(3)
    first, _ = table.take("a")
    table.give_back(first)
    assert [table.take("b")[0] for _ in range(3)] == [1, 2, 0]


@pytest.mark.parametrize("size", [0, (1 << 16) + 1])
def test_sizes(size: int) -> None:
    with pytest.raises(ValueError, match="16-bit"):
        SlotTable(size)


def test_which_records_are_of_the_present_user() -> None:
    table: SlotTable[str] = SlotTable(4)
    taken = [table.take(name) for name in "abc"]
    slots, generations = (np.array([place[n] for place in taken], np.int32) for n in (0, 1))
    assert table.fresh(slots, generations) is None
    table.give_back(taken[1][0])
    found = table.fresh(slots, generations)
    assert found is not None
    assert found.tolist() == [True, False, True]


def test_an_array_that_cannot_change_is_looked_at_again_after_a_slot_was_given_back() -> None:
    table: SlotTable[str] = SlotTable(2)
    slot, generation = table.take("a")
    slots, generations = np.array([slot], np.int32), np.array([generation], np.int32)
    slots.flags.writeable = False
    assert table.fresh(slots, generations) is None
    assert table.fresh(slots, generations) is None
    table.give_back(slot)
    found = table.fresh(slots, generations)
    assert found is not None
    assert not found.any()
