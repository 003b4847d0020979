"""Limits and budgets under any order of requests: what they promise holds, and what is given back is exact."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.errors import QuotaExceeded, RateLimited
from evap.metering import accounts
from evap.metering.accounts import Account, Bucket, Key, Ticket, admit, limits, reserve, settle

S = 1_000_000_000


def account(**limits: Any) -> Account:
    return Account(Key(id="alice", hash=b"", **limits), now_ns=0, wall_s=0)


def start(
    it: Account, *, prompt: int = 1, n: int = 1, asked: int | None = None, room: int = 1000, now: int = 0
) -> Ticket:
    admit(it, now, now // S)
    ticket = Ticket(it)
    try:
        granted = reserve(ticket, prompt=prompt, n=n, asked=asked, room=room, now_ns=now, wall_s=now // S)
    except RateLimited:
        settle(ticket, 0)
        raise
    ticket.steps = granted  # where the tests keep it
    return ticket


def test_fifty_requests_on_a_hundred_tokens() -> None:
    """The overshoot is none at all: every reservation is within what is left."""
    it, running = account(tokens_per_day=100), []
    for _ in range(50):
        with contextlib.suppress(QuotaExceeded):
            running.append(start(it, prompt=5, asked=30))
    assert len(running) == 3
    assert [t.steps for t in running] == [30, 30, 25], "the last one gets the rest"
    assert [t.capped for t in running] == [False, False, True]
    for ticket in running:
        settle(ticket, 5 + ticket.steps)
    assert it.day.used == 100
    with pytest.raises(QuotaExceeded) as error:
        admit(it, 0, 0)
    assert error.value.retry_after_s == 86_400


@given(
    st.integers(20, 200),
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 3), st.none() | st.integers(1, 60), st.booleans()), max_size=40
    ),
    st.randoms(use_true_random=False),
)
def test_a_budget_is_never_overrun(limit: int, asks: list[Any], random: Any) -> None:
    it, running, spent = account(tokens_per_day=limit, tokens_per_month=10 * limit), list[tuple[Ticket, int]](), 0
    for prompt, n, asked, finish in asks:
        try:
            ticket = start(it, prompt=prompt, n=n, asked=asked)
            running.append((ticket, prompt + n * ticket.steps))
        except QuotaExceeded:
            pass
        if finish and running:
            ticket, most = running.pop(random.randrange(len(running)))
            used = random.randint(0, most)
            spent += used
            settle(ticket, used)
        assert it.day.used == spent
        assert it.day.used + it.day.reserved <= limit
        assert it.streams == len(running)
    for ticket, most in running:
        spent += most
        settle(ticket, most)
    assert it.day.used == spent <= limit
    assert it.day.reserved == it.month.reserved == 0
    assert it.month.used == spent


@given(st.lists(st.tuples(st.integers(0, 30 * S), st.integers(1, 40), st.none() | st.integers(1, 80)), max_size=40))
def test_a_rate_is_overshot_by_one_reservation_at_most(asks: list[tuple[int, int, int | None]]) -> None:
    it, now = account(tokens_per_minute=120), 0
    used: list[tuple[int, int]] = []
    for gap, prompt, asked in asks:
        now += gap
        try:
            ticket = start(it, prompt=prompt, asked=asked, room=200, now=now)
        except RateLimited:
            continue
        tokens = prompt + ticket.steps
        settle(ticket, tokens)
        used.append((now, tokens))
        window = sum(t for at, t in used[:-1] if at > now - 60 * S)
        # A full bucket and what flowed in, before the last one came; the last one alone may overshoot.
        assert window <= 2 * 120 + max((t for _, t in used), default=0)


def test_a_rate_admits_what_fits_and_names_the_wait() -> None:
    it = account(tokens_per_minute=60)
    first = start(it, prompt=10, asked=30)
    with pytest.raises(RateLimited) as error:
        start(it, prompt=10, asked=30)
    assert error.value.retry_after_s == pytest.approx(20.0)
    assert [(x.name, x.limit, x.remaining) for x in error.value.limits] == [("tokens", 60, 20)]
    settle(first, 12)  # it ended early: what it did not use is there again
    start(it, prompt=10, asked=30)


def test_a_request_without_a_limit_of_its_own_takes_all_and_may_go_into_debt() -> None:
    it = account(tokens_per_minute=60)
    ticket = start(it, prompt=10)
    with pytest.raises(RateLimited):
        start(it, prompt=1, asked=1)
    settle(ticket, 120)
    with pytest.raises(RateLimited) as error:
        admit(it, 0, 0)
    assert error.value.retry_after_s == pytest.approx(61.0)
    admit(it, 61 * S, 61)


def test_a_request_larger_than_the_rate_waits_for_a_full_bucket() -> None:
    it = account(tokens_per_minute=60)
    settle(start(it, prompt=100, asked=100), 1)
    with pytest.raises(RateLimited):
        start(it, prompt=100, asked=100)
    start(it, prompt=100, asked=100, now=S)


def test_requests_and_streams() -> None:
    it = account(requests_per_minute=2, max_streams=1)
    ticket = start(it)
    with pytest.raises(RateLimited) as error:
        admit(it, 0, 0)
    assert error.value.code == "too_many_streams"
    settle(ticket, 0)
    settle(start(it), 0)
    with pytest.raises(RateLimited) as error:
        admit(it, 0, 0)
    assert error.value.retry_after_s == pytest.approx(30.0)
    admit(it, 30 * S, 30)
    assert [(x.name, x.remaining) for x in limits(it, 30 * S)] == [("requests", 0)]


def test_a_new_day_has_a_new_budget_and_the_old_one_keeps_its_own() -> None:
    it = account(tokens_per_day=100, tokens_per_month=150)
    ticket = start(it, prompt=10, asked=80)
    midnight = 86_400
    admit(it, 0, midnight)
    assert it.day.left == 100
    settle(ticket, 90)  # belongs to the day before
    assert it.day.used == 0
    assert it.month.used == 90
    fresh = Ticket(it)
    assert reserve(fresh, prompt=10, n=1, asked=100, room=100, now_ns=0, wall_s=midnight) == 50, "the month has 60 left"


def test_days_and_months() -> None:
    assert accounts.periods(0) == (0, 1970 * 12)
    assert accounts.periods(951_868_799) == (11_016, 2000 * 12 + 1), "29 February 2000"
    assert accounts.month_start(951_868_799) == 10_988
    error = None
    it = account(tokens_per_month=1)
    it.month.used = 1
    try:
        admit(it, 0, 86_400 * 30)
    except QuotaExceeded as e:
        error = e
    assert error is not None
    assert error.retry_after_s == 86_400, "January has one day left"


@given(st.integers(1, 1000), st.lists(st.tuples(st.integers(0, 10 * S), st.integers(0, 50)), max_size=30))
def test_a_bucket_is_exact(limit: int, steps: list[tuple[int, int]]) -> None:
    bucket, now = Bucket(limit, 0), 0
    for gap, units in steps:
        now += gap
        before = bucket.available(now)
        assert before <= limit
        bucket.take(units)
        assert bucket.available(now) == before - units
        wait = bucket.wait_s(min(limit, 1))
        assert (wait == 0) == (bucket.level >= 60 * S)


def test_changes_keep_what_was_used() -> None:
    it = account(tokens_per_day=100)
    settle(start(it, prompt=10, asked=20), 30)
    it.change(Key(id="alice", hash=b"", tokens_per_day=200, requests_per_minute=5), 0)
    assert it.day.left == 170
    assert it.requests.available(0) == 5


def test_the_self_test_passes() -> None:
    accounts.self_test()


def test_models() -> None:
    assert Key(id="a", hash=b"").may_use("any")
    assert not Key(id="a", hash=b"", models=("m",)).may_use("n")
