"""Every number of the list has a test, or a reason why not yet."""

from __future__ import annotations

import importlib
import pkgutil

from tests import conformance
from tests.conformance.cases import CASES, LAST, PENDING


def test_every_case_is_tested_or_pending() -> None:
    for module in pkgutil.iter_modules(conformance.__path__):
        importlib.import_module(f"tests.conformance.{module.name}")
    assert set(CASES).isdisjoint(PENDING)
    assert sorted(set(CASES) | set(PENDING)) == list(range(1, LAST + 1))
