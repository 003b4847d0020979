"""The register of numbered cases, and those that wait for what they are about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

LAST: Final = 61
CASES: dict[int, list[str]] = defaultdict(list)

#: Not tests that are skipped: there is nothing yet that they could drive.
PENDING: Final = {
    53: "push: RST_STREAM on a promised stream ends only that push (RFC 9113 6.6)",
    54: "push: ENABLE_PUSH=0 and MAX_CONCURRENT_STREAMS of the client hold (RFC 9113 8.4)",
    55: "push: a reset parent takes its pushes with it (RFC 9113 8.4)",
    56: "push: a pushed GET can be repeated within its life (RFC 9110 9.3.1)",
    57: "routing: loops and stale epochs are refused (RFC 9110 7.6, 15.5.20)",
    58: "routing: a peer that dies mid-way is an error, never a clean end (RFC 9113 8.1)",
}


def case(number: int, *sources: str) -> Callable[[F], F]:
    """Marks a test as one of case `number`; `sources` are the sections it is taken from."""
    assert 1 <= number <= LAST
    assert number not in PENDING
    assert sources

    def register(test: F) -> F:
        CASES[number].append(f"{test.__module__}.{test.__qualname__}")
        return test

    return register
