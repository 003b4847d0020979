"""The contract holds for whatever the router hands out."""

from __future__ import annotations

import pytest

from evap.messages import ParsedRequest
from evap.protocol.api.dialect import Dialect, Renderer
from evap.protocol.api.router import dialects

BODIES = {"chat": b'{"messages":[{"role":"user","content":"x"}]}', "completions": b'{"prompt":"x"}'}


@pytest.mark.parametrize("name", dialects())
def test_parse_gives_exactly_one_prompt(name: str) -> None:
    dialect: Dialect = dialects()[name]
    request = dialect.parse(BODIES[name], max_choices=1)
    assert isinstance(request, ParsedRequest)
    assert [request.messages, request.prompt_text, request.prompt_ids].count(None) == 2


@pytest.mark.parametrize("name", dialects())
def test_renderers_have_every_member_of_the_contract(name: str) -> None:
    dialect = dialects()[name]
    request = dialect.parse(BODIES[name][:-1] + b',"stream":true}', max_choices=1)
    members = {m for m in (*vars(Renderer), *Renderer.__annotations__) if not m.startswith("_")}
    for kind in ("sse", "text", "tokens"):
        renderer = dialect.renderer(request, id_suffix="x" * 24, model="m", created_s=1_700_000_000, kind=kind)
        assert renderer.kind == kind
        assert members <= set(dir(renderer))
