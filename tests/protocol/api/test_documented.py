"""docs/api.md names every field and every route that there is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from evap.protocol.api import chat, completions, fields, router

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
NAMES = sorted(
    {f.encode_name for body in (chat.ChatBody, completions.CompletionBody) for f in msgspec.structs.fields(body)}
    | set(fields.IGNORED)
    | {f.encode_name for f in msgspec.structs.fields(fields.StreamOptions)}
)


@pytest.mark.parametrize("name", NAMES)
def test_every_field(name: str) -> None:
    assert f"`{name}`" in PAGE or f"`{name}:" in PAGE


@pytest.mark.parametrize("path", [*router.ROUTES, *router.PREFIXES])
def test_every_route(path: str) -> None:
    assert f"`{path}" in PAGE


def test_ignored_fields_are_not_declared() -> None:
    declared = {
        f.encode_name for body in (chat.ChatBody, completions.CompletionBody) for f in msgspec.structs.fields(body)
    }
    assert declared.isdisjoint(fields.IGNORED)
