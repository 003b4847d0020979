"""The corpus, mutations of it, and JSON that resembles requests, against the invariant of fuzz/chat_json.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.errors import InvalidRequest
from evap.protocol.api.chat import ChatBody, Message
from evap.protocol.api.completions import CompletionBody
from fuzz import chat_json

CORPUS = sorted((Path(__file__).parents[2] / "fuzz" / "corpus" / "chat_json").iterdir())
SEEDS = [path.read_bytes() for path in CORPUS]


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name)
def test_corpus(path: Path) -> None:
    chat_json.one_input(path.read_bytes())


@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6), st.integers(0, 6)), max_size=6),
)
def test_mutations(seed: bytes, edits: list[tuple[int, bytes, int]]) -> None:
    data = bytearray(seed)
    for at, put, cut in edits:
        data[at : at + cut] = put
    chat_json.one_input(bytes(data))


def names(*bodies: type[msgspec.Struct]) -> list[str]:
    return sorted({f.encode_name for body in bodies for f in msgspec.structs.fields(body)})


LONG = st.text(max_size=5) | st.text(min_size=90, max_size=120)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | LONG
    | st.sampled_from(["user", "text", "function", "\ud83d"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "function", "name", "arguments"]) | LONG, inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(names(Message)), VALUES, max_size=4) | VALUES, max_size=3)
BODIES = st.fixed_dictionaries(
    {"messages": MESSAGES | st.just([{"role": "user", "content": "x"}]), "prompt": VALUES | st.just("x")},
    optional=dict.fromkeys(set(names(ChatBody, CompletionBody)) - {"messages", "prompt"}, VALUES),
)


@settings(max_examples=max(30, settings().max_examples // 3))  # slow to generate
@given(BODIES)
def test_bodies_that_resemble_requests(body: Any) -> None:
    chat_json.one_input(json.dumps(body).encode())


class Loud:
    """A dialect that repeats too much, to show that the invariant can fail."""

    def parse(self, body: bytes, *, max_choices: int) -> Any:
        raise InvalidRequest(body.decode())


def test_the_invariant_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_json, "DIALECTS", (Loud(),))
    chat_json.one_input(b"x" * 64)
    with pytest.raises(AssertionError, match="repeats"):
        chat_json.one_input(b"x" * 67)
