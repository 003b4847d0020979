"""`GET /v1/models` and `GET /v1/models/{id}`: OpenAI's model object, with vLLM's max_model_len."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evap.errors import NotFound, echo
from evap.protocol.api import sse


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served name. created: Unix time in s; max_model_len: context in tokens, null while the engine starts."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "evap"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


def list_body(cards: Sequence[ModelCard]) -> bytes:
    return sse.encode({"object": "list", "data": list(cards)})


def model_body(cards: Sequence[ModelCard], id: str) -> bytes:
    """Raises NotFound, as a request that names an unknown model does."""
    for card in cards:
        if card.id == id:
            return sse.encode(card)
    raise NotFound(f"the model '{echo(id)}' does not exist", param="model", code="model_not_found")
