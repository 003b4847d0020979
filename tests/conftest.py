"""Hypothesis profiles, a real server as a fixture, and a summary that counts what was skipped and why."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator

import hypothesis
import pytest

from tests.support import Server, running

# ci: the same examples every time; dev: new ones on every run; long: for an idle evening.
hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=3000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A synthetic server (tokens as fast as they go), shared by the tests of a module."""
    with running("--synthetic-step-ms", "0") as it:
        yield it


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """`start_server("--flag", ..., engine="synthetic", env={...})`: servers of one test, ended after it."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(running(*args, **settings))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter[str]()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section(f"{reasons.total()} skipped")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5} x {reason}")
