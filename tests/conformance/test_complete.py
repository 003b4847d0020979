"""Every number of the list has a test, or a reason why not yet, and docs/conformance.md says what the tests say."""

from __future__ import annotations

from tests.conformance.cases import CASES, LAST, PENDING
from tests.tools import conformance


def test_every_case_is_tested_or_pending() -> None:
    conformance.load()
    assert set(CASES).isdisjoint(PENDING)
    assert sorted(set(CASES) | set(PENDING)) == list(range(1, LAST + 1))


def test_the_page_says_what_the_tests_say() -> None:
    assert not conformance.difference(), "run: python -m tests.tools.conformance --write"
