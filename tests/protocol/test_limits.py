"""Token buckets and write progress, by the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.config import ProtocolConfig
from evap.errors import HeadersTooLarge, NotFound
from evap.protocol.limits import NS, Budgets, Shared, TokenBucket, WriteProgress, network_of, to_ns


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(10, 2.0)
    assert [bucket.take(0) for _ in range(11)] == [True] * 10 + [False]
    assert not bucket.take(NS // 2)
    assert bucket.take(2 * NS)


@given(st.lists(st.integers(0, NS), min_size=1, max_size=200))
def test_a_bucket_never_gives_more_than_burst_and_rate(steps: list[int]) -> None:
    bucket, now, taken = TokenBucket(5, 3.0), 0, 0
    for step in steps:
        now += step
        if bucket.take(now):
            taken += 1
        else:
            bucket.give(1)  # what was refused has not been used
    assert taken <= 5 + 3.0 * now / NS + 1


def test_time_that_stands_still_or_jumps_back_gives_nothing() -> None:
    bucket = TokenBucket(1, 1000.0)
    assert bucket.take(NS)
    assert not bucket.take(NS)
    assert not bucket.take(0)


def test_giving_back_is_capped() -> None:
    bucket = TokenBucket(4, 0.1)
    bucket.give(100)
    assert bucket.level == 4


def test_write_progress_counts_from_the_last_octet_that_left() -> None:
    progress = WriteProgress(0)
    progress.given(100)
    progress.note(100, 10)
    assert progress.since_ns == 10  # it began to wait here
    progress.note(100, 20)
    assert progress.since_ns == 10
    progress.given(50)
    progress.note(149, 30)
    assert progress.since_ns == 30  # one octet left
    progress.note(149, 40)
    assert (progress.since_ns, progress.queued) == (30, 149)
    progress.note(0, 50)
    assert progress.since_ns == 50


def test_budgets_follow_the_configuration() -> None:
    budgets = Budgets(ProtocolConfig(reset_burst=7, control_burst=11))
    assert (budgets.resets.level, budgets.control.level, budgets.window.level) == (7, 11, 11)


def test_the_date_follows_the_wall_clock() -> None:
    shared = Shared()
    shared.wall_offset_ns = 784_111_777 * NS
    assert shared.date(0) == b"Sun, 06 Nov 1994 08:49:37 GMT"
    assert shared.date(to_ns(1.5)) == b"Sun, 06 Nov 1994 08:49:38 GMT"


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("", ""),
        ("10.0.0.1:443", "10.0.0.1"),
        ("[2001:db8:1:2:3:4:5:6]:443", "2001:db8:1:2::"),
        ("[2001:db8:1:2::9]:1", "2001:db8:1:2::"),
        ("[fe80::1%eth0]:1", "fe80::"),
        ("[::ffff:10.0.0.1]:1", "10.0.0.1"),
        ("[::1]:1", "::"),
        ("[nonsense]:1", "nonsense"),
    ],
)
def test_whom_an_address_stands_for(peer: str, network: str) -> None:
    assert network_of(peer) == network


def test_a_refusal_of_the_wire_is_an_answer_like_any_other() -> None:
    statuses: list[int] = []
    shared = Shared(answered=statuses.append)
    shared.note(HeadersTooLarge("too large"))
    shared.note(NotFound("no such route"))
    assert statuses == [431, 404]
