"""The tree as printed is the tree as written, and no message echoes much of what a client sent."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from evap import errors
from evap.errors import MAX_ECHO_BYTES, MAX_MESSAGE_BYTES, EvapError, InvalidRequest, StartupError, echo


def written(cls: type[EvapError], depth: int = 0) -> list[tuple[int, str]]:
    return [(depth, cls.__name__)] + [line for sub in cls.__subclasses__() for line in written(sub, depth + 1)]


def test_the_docstring_prints_the_tree() -> None:
    assert errors.__doc__ is not None
    lines = re.findall(r"^( *)([A-Z]\w+)", errors.__doc__.split("\n\n", 1)[1], re.MULTILINE)
    assert [(len(indent) // 4, name) for indent, name in lines] == written(EvapError)


@given(st.text(max_size=3000))
def test_a_message_is_at_most_a_kilobyte(text: str) -> None:
    assert len(InvalidRequest(text).message.encode()) <= MAX_MESSAGE_BYTES


@given(st.one_of(st.text(), st.binary(), st.integers(), st.lists(st.integers())))
def test_an_echo_is_short_printable_and_encodable(value: object) -> None:
    text = echo(value)
    assert len(text.encode()) <= MAX_ECHO_BYTES
    assert text.isprintable()


def test_fields_of_the_openai_shape() -> None:
    error = InvalidRequest("no", param="n", code="bad", retry_after_s=2.5)
    assert (error.type, error.param, error.code, error.retry_after_s) == ("invalid_request_error", "n", "bad", 2.5)
    assert errors.NotFound("x").code == "not_found"
    assert errors.MethodNotAllowed("x", allow="GET").allow == "GET"
    assert StartupError("no", remedy="do").remedy == "do"
