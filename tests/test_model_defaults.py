"""A model's own defaults (its generation_config.json) hold where a request says nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evap.engine.synthetic import SyntheticReplica
from tests.test_dispatch import House


@pytest.mark.parametrize(
    ("asked", "own", "tokens"), [(None, 7, 7), (None, 0, None), (None, 9_999, None), (3, 7, 3), (9, 7, 9)]
)
def test_a_models_own_length_is_that_of_requests_without_one(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, own: int, tokens: int | None
) -> None:
    """It gives way to the context, where a request's own would be refused."""
    house = House(max_model_len=200)
    monkeypatch.setattr(SyntheticReplica, "info", msgspec.structs.replace(house.replica.info, default_max_tokens=own))
    fields: dict[str, Any] = {} if asked is None else {"max_tokens": asked}
    house.ask(**fields)
    house.loop.run()
    ((exchange, usage),) = house.settled
    assert exchange.sampling.max_tokens == (tokens or 200 - usage.prompt)


def test_a_models_own_sampling_holds_for_what_a_request_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    monkeypatch.setattr(SyntheticReplica, "info", msgspec.structs.replace(house.replica.info, sampling_defaults=own))
    house.ask()
    house.ask(temperature=1.0, top_k=0, top_p=None, min_p=0.1)
    house.loop.run()
    found = [(e.sampling.temperature, e.sampling.top_k, e.sampling.top_p, e.sampling.min_p) for e, _ in house.settled]
    assert found == [(0.6, 20, 0.9, 0.0), (1.0, 0, 0.9, 0.1)]
