"""Limits over several processes: the rules of one, whatever the processes do and however they end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.errors import EvapError, QuotaExceeded, RateLimited, StartupError
from evap.metering import accounts
from evap.metering.accounts import Account, Key, Ticket
from evap.metering.shared_accounts import SharedAccounts, make_memory

PROCESSES, ROWS = 3, 4
DAY_S = 86_400


class Shared:
    """The same key in several processes: their tables of one memory, and their Accounts."""

    def __init__(self, **rights: Any) -> None:
        self.key = Key(id="alice", hash=b"", **rights)
        self.fd = make_memory("test", SharedAccounts.size(ROWS, PROCESSES))
        self.tables = [SharedAccounts(self.fd, rows=ROWS, processes=PROCESSES, process=n) for n in range(PROCESSES)]
        self.accounts = [Account(self.key, now_ns=0, wall_s=0) for _ in self.tables]
        for table, account in zip(self.tables, self.accounts, strict=True):
            table.enter(account)

    def admit(self, process: int, *, now_ns: int = 0, wall_s: int = 0) -> Ticket:
        self.tables[process].admit(self.accounts[process], now_ns, wall_s)
        return Ticket(self.accounts[process])

    def reserve(self, process: int, ticket: Ticket, asked: int, *, prompt: int = 0, wall_s: int = 0) -> int:
        return self.tables[process].reserve(
            ticket, prompt=prompt, n=1, asked=asked, room=1000, now_ns=0, wall_s=wall_s
        )  # fmt: skip

    def close(self) -> None:
        for table in self.tables:
            table.close()
        os.close(self.fd)


@pytest.fixture
def shared() -> Iterator[Any]:
    made: list[Shared] = []

    def make(**rights: Any) -> Shared:
        made.append(Shared(**rights))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_streams_are_counted_together(shared: Any) -> None:
    it = shared(max_streams=2)
    first, _ = it.admit(0), it.admit(1)
    with pytest.raises(RateLimited, match="2 streams open"):
        it.admit(2)
    it.tables[0].settle(first, 0)
    it.admit(2)


def test_a_budget_is_reserved_and_used_together(shared: Any) -> None:
    it = shared(tokens_per_day=100)
    one, other = it.admit(0), it.admit(1)
    assert it.reserve(0, one, 60) == 60
    assert it.reserve(1, other, 60) == 40  # what is left
    assert other.capped
    with pytest.raises(QuotaExceeded):
        it.admit(2)
    it.tables[1].settle(other, 10)
    assert it.reserve(2, it.admit(2), 60) == 30
    it.tables[0].settle(one, 60)


def test_a_new_day_forgets_what_others_had_reserved_for_the_old_one(shared: Any) -> None:
    it = shared(tokens_per_day=100)
    old = it.admit(0)
    it.reserve(0, old, 80)
    new = it.admit(1, wall_s=DAY_S)
    assert it.reserve(1, new, 100, wall_s=DAY_S) == 100
    it.tables[0].settle(old, 80)  # of yesterday
    it.tables[1].settle(new, 30)
    assert it.reserve(2, it.admit(2, wall_s=DAY_S), 100, wall_s=DAY_S) == 70


def test_rates_are_one_bucket(shared: Any) -> None:
    it = shared(requests_per_minute=3, tokens_per_minute=1000)
    tickets = [it.admit(n) for n in range(3)]
    with pytest.raises(RateLimited, match="requests per minute"):
        it.admit(0)
    it.reserve(0, tickets[0], 900)
    with pytest.raises(RateLimited, match="tokens per minute"):
        it.reserve(1, tickets[1], 200)
    assert [limit.remaining for limit in it.tables[1].limits(it.accounts[1], 0)] == [0, 100]


def test_a_dead_process_holds_nothing(shared: Any) -> None:
    it = shared(max_streams=1, tokens_per_day=100, tokens_per_minute=100)
    ticket = it.admit(1)
    it.reserve(1, ticket, 100)
    it.tables[0].bury(1, {"alice": 25, "somebody": 1000})
    assert it.reserve(0, it.admit(0), 100) == 75  # of the day; and the rate has what was not used back
    with pytest.raises(RateLimited):
        it.admit(2)


def test_a_limit_that_changes_is_changed_once(shared: Any) -> None:
    it = shared(requests_per_minute=2)
    for _ in range(2):
        it.admit(0)
    new = Key(id="alice", hash=b"", requests_per_minute=3)
    it.tables[0].change(it.accounts[0], new, 0)
    it.admit(1)  # the others have not read the file yet
    for n in (1, 2):
        it.tables[n].change(it.accounts[n], new, 0)
    for n in (1, 2):
        it.admit(n)
    with pytest.raises(RateLimited):
        it.admit(0)
    none = Key(id="alice", hash=b"")
    it.tables[0].change(it.accounts[0], none, 0)
    it.admit(0)
    with pytest.raises(RateLimited):
        it.admit(1)  # still a limit there, until it has read the file
    it.tables[1].change(it.accounts[1], none, 0)
    it.admit(1)


def test_rows_are_found_again_and_run_out(shared: Any) -> None:
    it = shared(max_streams=1)
    it.admit(0)
    late = SharedAccounts(it.fd, rows=ROWS, processes=PROCESSES, process=2)
    account = Account(it.key, now_ns=0, wall_s=0)
    late.enter(account)  # a process that was started again
    with pytest.raises(RateLimited):
        late.admit(account, 0, 0)
    for n in range(ROWS - 1):
        late.enter(Account(Key(id=f"k{n}", hash=b""), now_ns=0, wall_s=0))
    with pytest.raises(StartupError, match="there have been 4 keys"):
        late.enter(Account(Key(id="one more", hash=b""), now_ns=0, wall_s=0))
    late.close()


STEPS = st.lists(
    st.tuples(st.integers(0, PROCESSES - 1), st.integers(0, 3), st.integers(1, 60), st.integers(0, 90), st.booleans()),
    max_size=40,
)


@settings(max_examples=60)
@given(STEPS)
def test_several_processes_decide_as_one_would(steps: list[tuple[int, int, int, int, bool]]) -> None:
    """Every step in some process of several, and in the only one of another world: the same answer, the same state."""
    rights: dict[str, Any] = {"max_streams": 3, "tokens_per_minute": 500, "requests_per_minute": 30}
    rights["tokens_per_day"] = 2000
    many, alone = Shared(**rights), Account(Key(id="alice", hash=b"", **rights), now_ns=0, wall_s=0)
    running: list[tuple[int, Ticket, Ticket]] = []
    now = wall = 0
    for process, prompt, tokens, seconds, ends in steps:
        now, wall = now + seconds * 10**9, wall + seconds * 600
        if ends and running:
            where, ours, theirs = running.pop(0)
            used = min(tokens, ours.budget)
            many.tables[where].settle(ours, used)
            accounts.settle(theirs, used)
            continue
        outcomes: list[Any] = []
        ours, theirs = Ticket(many.accounts[process]), Ticket(alone)
        for rules, account, ticket in ((many.tables[process], many.accounts[process], ours), (accounts, alone, theirs)):
            try:
                rules.admit(account, now, wall)
                held = True
            except EvapError as error:
                outcomes.append(str(error))
                continue
            try:
                most = rules.reserve(ticket, prompt=prompt, n=1, asked=tokens, room=100, now_ns=now, wall_s=wall)
                outcomes.append((most, ticket.rate, ticket.budget, ticket.capped))
            except EvapError as error:
                outcomes.append(str(error))
                rules.settle(ticket, 0)
                held = False
        assert outcomes[0] == outcomes[1]
        if isinstance(outcomes[0], tuple) and held:
            running.append((process, ours, theirs))
    many.close()


def test_a_key_file_that_has_no_room_takes_none(shared: Any) -> None:
    table = shared().tables[0]
    table.check_room(["alice", "b", "c", "d"])
    with pytest.raises(StartupError, match="there have been 4 keys"):
        table.check_room(["b", "c", "d", "e"])
    table.enter(Account(Key(id="b", hash=b""), now_ns=0, wall_s=0))
    table.check_room(["alice", "x", "y"])
