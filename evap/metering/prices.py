"""Prices per model, in TOML, and exact costs. Decimal throughout: no cost is ever a binary fraction.

currency = "USD"
[models."smollm2-135m"]     # or [models."*"] for all that are not named
prompt = 0.10               # per million tokens
cached = 0.05               # of the prompt, from the cache; default: as prompt
completion = 0.40
"""

from __future__ import annotations

import tomllib
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, Final

import msgspec

from evap.errors import StartupError, echo

_MILLION: Final = Decimal(1_000_000)
#: Enough for any product of a 64-bit count and a price of 30 digits: nothing is ever rounded.
_EXACT: Final = Context(prec=80)


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Per million tokens."""

    prompt: Decimal
    cached: Decimal
    completion: Decimal


class Prices:
    """Prices of every model; `currency` is only a name."""

    def __init__(self, models: dict[str, Price], currency: str) -> None:
        self._models = models
        self.currency = currency

    def cost(self, model: str, *, prompt: int, cached: int, completion: int) -> Decimal | None:
        """Exact; None for a model without a price. `cached` of the `prompt` tokens came from the cache."""
        price = self._models.get(model) or self._models.get("*")
        if price is None:
            return None
        parts = ((prompt - cached, price.prompt), (cached, price.cached), (completion, price.completion))
        total = Decimal(0)
        for tokens, each in parts:
            total = _EXACT.add(total, _EXACT.multiply(Decimal(tokens), each))
        return _EXACT.divide(total, _MILLION)


def plain(cost: Decimal) -> str:
    """Without exponent and without zeros at the end."""
    text = f"{cost:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def read(path: Path) -> Prices:
    """Raises StartupError, with the place."""
    try:
        data = tomllib.loads(path.read_text(), parse_float=Decimal)
    except OSError as error:
        raise StartupError(f"cannot read the prices {path}: {error.strerror}", remedy="check --prices") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not valid TOML: {error}") from error
    models, currency = data.pop("models", {}), data.pop("currency", "USD")
    if data or not isinstance(models, dict) or not isinstance(currency, str):
        raise StartupError(f"{path}: a price list has `currency` and [models.NAME] tables", remedy="docs/metering.md")
    return Prices({name: _price(path, name, fields) for name, fields in models.items()}, currency)


def _price(path: Path, name: str, fields: Any) -> Price:
    where = f"{path}: [models.{echo(name)}]"
    if not isinstance(fields, dict) or not {"prompt", "completion"} <= set(fields) <= {
        "prompt",
        "cached",
        "completion",
    }:
        raise StartupError(f"{where}: prompt and completion are needed, cached is allowed", remedy="docs/metering.md")
    numbers = {}
    for field, value in fields.items():
        number = Decimal(value) if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else None
        if number is None or not number.is_finite() or number < 0 or len(number.as_tuple().digits) > 30:
            raise StartupError(f"{where}: {field} is not a price", remedy="a number such as 0.15, per million tokens")
        numbers[field] = number
    return Price(prompt=numbers["prompt"], cached=numbers.get("cached", numbers["prompt"]),
                 completion=numbers["completion"])  # fmt: skip
