"""Structured output as requests ask for it -> the one constraint that vLLM takes, its size and nesting checked.

Three spellings: OpenAI's `response_format`, vLLM's `structured_outputs`, and the older `guided_*`. Nothing is compiled
here and nothing recurses: the input may be hostile (schemas 3,000 levels deep, 100 KB of brackets).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from evap.errors import InvalidRequest

MAX_LISTED: Final = 1024  #: texts of a choice; brackets of a regular expression
MAX_GRAMMAR_BYTES: Final = 64 << 10
#: C++ and Rust compilers of grammars recurse; nested deeper than this, a schema is refused before any of them sees it
MAX_NESTING: Final = 64
#: Names of the constraints, of which a request may have one.
CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
GUIDED: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_MODIFIERS: Final = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")


def constraint(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of StructuredOutputsParams that a request asks for, or {}. Sizes and nesting are checked."""
    found = response_format(extra["response_format"]) if extra.get("response_format") is not None else {}
    given = extra.get("structured_outputs")
    if given is not None:
        if not isinstance(given, dict) or set(given) - {*CONSTRAINTS, *_MODIFIERS}:
            raise InvalidRequest("structured_outputs has an unknown field", param="structured_outputs")
        found |= {name: value for name, value in given.items() if value is not None}
    found |= {name: extra[old] for old, name in GUIDED.items() if extra.get(old) is not None}
    kinds = [name for name in CONSTRAINTS if name in found]
    if len(kinds) > 1:
        raise InvalidRequest(f"{kinds[0]} and {kinds[1]} exclude each other", param="structured_outputs")
    if not kinds:
        if found:
            raise InvalidRequest("structured_outputs names no constraint", param="structured_outputs")
        return {}
    _shape(kinds[0], found[kinds[0]])
    return found


def response_format(given: Any) -> dict[str, Any]:
    """OpenAI's response_format."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(given)}
    if kind != "json_schema":
        raise InvalidRequest("response_format.type must be text, json_object or json_schema", param="response_format")
    holder = given.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format.json_schema.schema must be an object", param="response_format")
    return {"json": schema}


def _shape(kind: str, value: Any) -> None:
    """Types, sizes and nesting of a constraint, before anything is compiled."""
    param = "structured_outputs"
    if kind == "json_object":
        if value is not True:
            raise InvalidRequest("json_object must be true", param=param)
    elif kind == "choice":
        texts(value, param, MAX_LISTED, MAX_GRAMMAR_BYTES)
    elif kind == "json":
        schema = value if isinstance(value, dict) else _parsed(value)
        if depth(schema) > MAX_NESTING:
            raise InvalidRequest(f"the schema is nested deeper than {MAX_NESTING} levels", param=param)
        if len(json.dumps(schema)) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"the schema is larger than {MAX_GRAMMAR_BYTES} bytes", param=param)
    elif not isinstance(value, str) or not 0 < len(value.encode(errors="replace")) <= MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{kind} must be a text of 1 to {MAX_GRAMMAR_BYTES} bytes", param=param)
    elif "\0" in value or max((value.count(c) for c in "([{"), default=0) > MAX_LISTED:
        raise InvalidRequest(f"{kind} is not one that can be compiled", param=param)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else _raise()
    except (ValueError, RecursionError) as e:
        raise InvalidRequest("json must be a JSON schema", param="structured_outputs") from e


def _raise() -> Any:
    raise ValueError("neither an object nor a text")


def depth(value: Any) -> int:
    """How deeply lists and objects are nested. Iterative: the input is hostile."""
    deepest, level = 0, [value]
    while level:
        inner = [v for v in level if isinstance(v, (dict, list))]
        if not inner or deepest > MAX_NESTING:
            return deepest
        deepest += 1
        level = [child for v in inner for child in (v.values() if isinstance(v, dict) else v)]
    return deepest


def texts(value: Any, param: str, most: int, longest: int) -> list[str]:
    whole = isinstance(value, (list, tuple)) and 0 < len(value) <= most
    if not whole or not all(isinstance(v, str) and 0 < len(v) <= longest for v in value):
        raise InvalidRequest(f"{param} must be 1 to {most} texts of 1 to {longest} characters", param=param)
    return list(value)


def whole(value: Any, param: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"{param} must be a whole number, {low}..{high}", param=param)
    return value
