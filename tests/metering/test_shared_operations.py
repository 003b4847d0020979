"""Idempotency keys over several processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from evap.errors import Conflict, Overloaded
from evap.metering import shared_operations as module
from evap.metering.shared_accounts import make_memory
from evap.metering.shared_operations import SIZE, SharedOperations


@pytest.fixture
def pair() -> Iterator[tuple[SharedOperations, SharedOperations]]:
    fd = make_memory("test", SIZE)
    both = SharedOperations(fd, 0), SharedOperations(fd, 1)
    yield both
    for one in both:
        one.close()
    os.close(fd)


Pair = tuple[SharedOperations, SharedOperations]


def test_what_runs_in_one_is_refused_by_the_other(pair: Pair) -> None:
    one, other = pair
    one.begin("alice", "op", "chatcmpl-1")
    with pytest.raises(Conflict, match="is running: its record is at /v1/usage/chatcmpl-1") as caught:
        other.begin("alice", "op", "chatcmpl-2")
    assert caught.value.code == "operation_running"
    other.begin("bob", "op", "chatcmpl-3")  # another key's
    one.end("alice", "op", "chatcmpl-1", used_up=True)
    with pytest.raises(Conflict, match="complete"):
        other.begin("alice", "op", "chatcmpl-2")
    other.end("bob", "op", "chatcmpl-3", used_up=False)
    one.begin("bob", "op", "chatcmpl-4")
    one.end("nobody", "op", "x", used_up=True)  # never begun: nothing to end
    one.begin("nobody", "op", "x")


def test_a_dead_process_runs_nothing(pair: Pair) -> None:
    one, other = pair
    for n in range(5):
        one.begin("alice", f"op{n}", f"id{n}")
    other.begin("alice", "mine", "id")
    other.remember("alice", "op3", "id3")  # its record says that it is used up
    other.bury(0)
    other.begin("alice", "op0", "again")
    with pytest.raises(Conflict, match="complete"):
        other.begin("alice", "op3", "again")
    with pytest.raises(Conflict, match="running"):
        one.begin("alice", "mine", "again")


def test_the_oldest_makes_room_and_the_ledger_is_asked_from_then_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETS", 1)
    one, other = pair
    for n in range(module.WAYS):
        one.remember("alice", f"op{n}", f"id{n}")
    assert not other.forgot
    one.begin("alice", "new", "id")
    assert other.forgot
    one.begin("alice", "op0", "forgotten")  # which took op1's place
    with pytest.raises(Conflict):
        other.begin("alice", "op2", "kept")
    for n in range(module.WAYS - 2):
        one.begin("alice", f"more{n}", "id")
    with pytest.raises(Overloaded):
        one.begin("alice", "too much", "id")
