"""A prompt that does not fit the context, however it came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evap.errors import ContextOverflow
from evap.protocol.api.router import dialects
from tests.fakes import FakeReply, head
from tests.test_dispatch import House


@pytest.mark.parametrize("limit", [0, 49], ids=["ids counted", "text cut short"])
@pytest.mark.parametrize(
    ("dialect", "field", "prompt"),
    [
        ("chat", "messages", [{"role": "user", "content": "a b c " * 40}]),
        ("completions", "prompt", "a b c " * 40),
        ("completions", "prompt", [1] * 60),
    ],
)
def test_a_prompt_that_is_too_long_is_named_as_the_client_named_it(
    dialect: str, field: str, prompt: Any, limit: int
) -> None:  # fmt: skip
    house = House(max_model_len=50)
    house.dispatch.text.limit_tokens = limit
    reply = FakeReply(house.core, 1)
    house.dispatch.generate(reply, head(), json.dumps({field: prompt}).encode(), dialects()[dialect])
    house.loop.run()
    assert reply.status == 400
    error = json.loads(reply.body)["error"]
    assert (error["code"], error["param"]) == (ContextOverflow.default_code, field)
