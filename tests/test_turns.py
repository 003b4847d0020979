"""What processes tell each other of callers and places: sums of the others, and nothing of the dead."""

from __future__ import annotations

from evap.turns import ROWS, Turns


def several(count: int, *, one_engine: bool = True) -> list[Turns]:
    memory = memoryview(bytearray(Turns.size(count)))
    return [
        Turns(memory, process=n, processes=count, secret=b"s" * 32, one_engine=one_engine) for n in range(count)
    ]  # fmt: skip


def test_each_sees_the_others() -> None:
    a, b, c = several(3)
    a.serve("alice", 2)
    b.serve("alice", 3)
    b.serve("bob", 5)
    a.serve("alice", 1)
    assert [it.served_elsewhere("alice") for it in (a, b, c)] == [3, 3, 6]
    assert [it.served_elsewhere("bob") for it in (a, b, c)] == [5, 0, 5]
    for held, it in enumerate((a, b, c), 1):
        it.hold(held)
    assert [it.held_elsewhere() for it in (a, b, c)] == [5, 4, 3]


def test_the_dead_hold_nothing_and_what_they_gave_was_given() -> None:
    a, b = several(2)
    b.hold(7)
    b.serve("alice", 4)
    b.bury()
    assert (a.held_elsewhere(), a.served_elsewhere("alice")) == (0, 4)


def test_engines_of_their_own_have_places_of_their_own() -> None:
    a, b = several(2, one_engine=False)
    b.hold(7)
    b.serve("alice", 4)
    assert (a.held_elsewhere(), a.served_elsewhere("alice")) == (0, 4)


def test_a_connection_is_known_to_its_process_only() -> None:
    a, b = several(2)
    b.serve(1 << 40, 5)
    assert a.served_elsewhere(1 << 40) == 0


def test_any_number_of_callers() -> None:
    a, b = several(2)
    for number in range(3 * ROWS):
        b.serve(f"10.0.{number >> 8}.{number & 255}", 1)
    assert len(b._rows) <= ROWS
    assert sum(a._numbers[n] for n in range(2 * (ROWS + 1))) == 3 * ROWS
