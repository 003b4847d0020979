"""The register of numbered cases: what comes in, what the server does, which tests say so, and what is still pending.

`docs/conformance.md` is made from it: `python -m tests.tools.conformance --write`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from tests.conformance.listing import CASE_LIST

F = TypeVar("F", bound=Callable[..., Any])


class Found(NamedTuple):
    """A test of a case, and the sections that the test is taken from."""

    test: str
    sources: tuple[str, ...]


LAST: Final = len(CASE_LIST)
CASES: dict[int, list[Found]] = defaultdict(list)

#: Not tests that are skipped: there is nothing yet that they could drive.
PENDING: Final = {
    57: "no node relays to another yet: nothing has an epoch or a ticket (RFC 9110 7.6, 15.5.20)",
    58: "no node relays to another yet; for an engine that dies: tests/clients/test_overload.py (RFC 9113 8.1)",
}


def case(number: int, *sources: str) -> Callable[[F], F]:
    """Marks a test as one of case `number`; `sources` are the sections it is taken from."""
    assert 1 <= number <= LAST
    assert number not in PENDING
    assert sources

    def register(test: F) -> F:
        CASES[number].append(Found(f"{test.__module__}.{test.__qualname__}", sources))
        return test

    return register
