from __future__ import annotations

import json

import pytest

from evap.errors import NotFound
from evap.protocol.api.models import ModelCard, list_body, model_body

CARDS = [ModelCard(id="org/m", created=1_700_000_000, max_model_len=8192), ModelCard(id="n", created=1)]
FIRST = {
    "id": "org/m", "object": "model", "created": 1_700_000_000, "owned_by": "evap", "root": None, "parent": None,
    "max_model_len": 8192,
}  # fmt: skip


def test_list() -> None:
    data = json.loads(list_body(CARDS))
    assert data["object"] == "list"
    assert data["data"][0] == FIRST
    assert [m["id"] for m in data["data"]] == ["org/m", "n"]


def test_retrieve() -> None:
    assert json.loads(model_body(CARDS, "org/m")) == FIRST
    with pytest.raises(NotFound) as caught:
        model_body(CARDS, "M" * 1000)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert len(caught.value.message) < 110
