"""Prices: exact, or refused."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.errors import StartupError
from evap.metering import prices


def test_costs_are_exact_decimals(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        'currency = "EUR"\n[models.m]\nprompt = 0.1\ncached = 0.03\ncompletion = 8\n'
        '[models."*"]\nprompt = 1\ncompletion = 2\n'
    )
    found = prices.read(path)
    assert found.currency == "EUR"
    cost = found.cost("m", prompt=3, cached=1, completion=1)
    assert cost == Decimal("0.00000823")
    assert prices.plain(cost) == "0.00000823"
    assert found.cost("other", prompt=3, cached=1, completion=0) == Decimal("0.000003")
    assert prices.plain(Decimal("1E+3")) == "1000"


@given(
    st.integers(0, 1 << 63), st.integers(0, 1 << 63),
    st.decimals(min_value=0, max_value=10**9, places=12), st.decimals(min_value=0, max_value=10**9, places=12),
)  # fmt: skip
def test_nothing_is_rounded(prompt: int, completion: int, in_price: Decimal, out_price: Decimal) -> None:
    price = prices.Price(prompt=in_price, cached=in_price, completion=out_price)
    cost = prices.Prices({"m": price}, "USD").cost("m", prompt=prompt, cached=prompt // 2, completion=completion)
    assert cost is not None
    assert Fraction(cost) == (prompt * Fraction(in_price) + completion * Fraction(out_price)) / 1_000_000
    assert Fraction(prices.plain(cost)) == Fraction(cost)


def test_a_model_without_a_price_has_no_cost() -> None:
    assert prices.Prices({}, "USD").cost("m", prompt=1, cached=0, completion=1) is None


@pytest.mark.parametrize(
    "text",
    ["[models.m]\nprompt = 1", "[models.m]\nprompt = 1\ncompletion = -1", '[models.m]\nprompt = 1\ncompletion = "2"',
     "[models.m]\nprompt = 1\ncompletion = nan", "[models.m]\nprompt=1\ncompletion=true", "[modles.m]\nprompt=1",
     "models = 1", "[models.m", "[models.m]\nprompt=1\ncompletion=1\nextra=1"],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(StartupError, match=r"p\.toml"):
        prices.read(tmp_path / "p.toml")
    with pytest.raises(StartupError, match="cannot read"):
        prices.read(tmp_path / "absent")
