"""What `auto` takes, and what is said when an engine is missing."""

from __future__ import annotations

import pytest

from evap.engine import choose
from evap.errors import StartupError


def test_auto_takes_the_best_that_is_installed() -> None:
    assert choose.choose("auto", lambda package: True) == choose.AUTO[0]
    for name in choose.AUTO:
        assert choose.choose("auto", lambda package, name=name: package == choose.NEEDS[name][0]) == name  # type: ignore[misc]


def test_auto_with_nothing_installed_says_what_to_install() -> None:
    with pytest.raises(StartupError) as caught:
        choose.choose("auto", lambda package: False)
    assert "pip install 'evap[torch]'" in caught.value.remedy
    assert "--engine synthetic" in caught.value.remedy


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_missing_extra_is_named(engine: str) -> None:
    assert choose.choose(engine, lambda package: True) == engine
    with pytest.raises(StartupError, match=f"needs the package {engine}") as caught:
        choose.choose(engine, lambda package: False)
    assert caught.value.remedy == f"pip install 'evap[{engine}]'"


def test_synthetic_needs_nothing() -> None:
    assert choose.choose("synthetic", lambda package: False) == "synthetic"


def test_installed_looks_without_importing() -> None:
    assert choose.installed("json")
    assert not choose.installed("a_package_that_nobody_has")
