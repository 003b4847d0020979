"""Structured output's three spellings, and what is refused by its shape alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.vllm.constraints import CONSTRAINTS, MAX_NESTING, constraint, depth
from evap.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json": SCHEMA}),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, {"regex": "a", "whitespace_pattern": " "}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"other": 1}, {}),
    ],
)  # fmt: skip
def test_spellings(extra: dict[str, Any], found: dict[str, Any]) -> None:
    assert constraint(extra) == found


def test_a_structural_tag_is_passed_as_text() -> None:
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    assert isinstance(constraint({"response_format": tag})["structural_tag"], str)


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": []},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "text"}}},
        {"structured_outputs": "x"},
        {"structured_outputs": {}, "guided_regex": 5},
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        {"guided_json": 5},
        {"guided_choice": "yes"},
        {"guided_choice": ["a"] * 1025},
        {"guided_regex": "[" * 1025},
        {"guided_regex": "x" * 65_537},
    ],
)
def test_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        constraint(extra)


def test_depth_counts_and_gives_up_early() -> None:
    assert depth(5) == 0
    assert depth({"a": [1, {"b": {}}]}) == 4
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert MAX_NESTING < depth(deep) <= MAX_NESTING + 2
    while deep:
        deep = deep.pop()  # taken apart by hand: freeing it would recurse


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text(max_size=5), t, max_size=3))
keys = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


@given(st.dictionaries(st.sampled_from(keys), trees, max_size=3))
def test_anything_is_one_constraint_or_refused(extra: dict[str, Any]) -> None:
    try:
        found = constraint(extra)
    except InvalidRequest:
        return
    assert len([name for name in CONSTRAINTS if name in found]) == (1 if found else 0)
