"""A JSON body -> a typed struct, in one pass; and what to tell a client whose body does not fit.

Rules:
1. Types are strict (RFC 8259 JSON, msgspec's strict mode): "5", 5.0 and true are not integers; NaN is not JSON.
2. A message names the field (`messages[3].content[0].text`) and what is wanted. It never quotes the value, except
   through `errors.echo` (64 bytes).
3. Whatever could be large for no good reason (stop strings, tools) is kept raw, measured, and only then decoded.
4. Of duplicate keys the last one counts. Unknown keys are skipped, after a syntax check.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from evap.errors import InvalidRequest, echo

T = TypeVar("T")

MAX_DEPTH: Final = 64
#: the path of a lone surrogate is searched for in bodies up to this size
MAX_DIAGNOSED_BYTES: Final = 1 << 20
_CHUNK: Final = 1 << 20

ABSENT: Final = msgspec.Raw(b"")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's struct. Raises InvalidRequest for anything else; time and memory are O(len(body))."""
    if not body:
        raise InvalidRequest("the request body is empty; send a JSON object")
    check_depth(body)
    try:
        value = decoder.decode(body)
    except msgspec.DecodeError as error:
        raise explain(error, body, decoder.type) from None
    except RecursionError:  # unreachable after check_depth, unless the JSON is broken as well
        raise InvalidRequest("the request body is not valid JSON") from None
    if not body.isascii():
        _check_utf8(body)  # msgspec has looked at the strings it kept, not at those it skipped
    return value


def decode_small(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], param: str, max_bytes: int) -> T:
    """A field that was kept raw. Raises InvalidRequest if it is longer than `max_bytes`, or of another type."""
    data = bytes(raw)
    if len(data) > max_bytes:
        raise InvalidRequest(f"{param} is too large: {len(data)} bytes of JSON, at most {max_bytes}", param=param)
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise explain(error, data, decoder.type, param) from None


def is_set(raw: msgspec.Raw) -> bool:
    """False for a raw field that is absent or null."""
    return bool(raw) and bytes(raw) != b"null"


# Nesting


def check_depth(body: bytes) -> None:
    """Refuse JSON nested deeper than MAX_DEPTH. Almost every body is cleared by the first line."""
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise InvalidRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")


_KEPT: Final = b'[]{}"'
_NOT_KEPT: Final = bytes(b for b in range(256) if b not in _KEPT)
_STEP: Final = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


def _depth(body: bytes) -> int:
    """Deepest nesting, for valid JSON (for other input some number). Vectorised: about a nanosecond a byte."""
    if b"\\" in body:
        # Escapes stand in strings only, and a run of backslashes starts with an escaping one: drop pairs, then \".
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(body.translate(None, _NOT_KEPT), np.uint8)
    deepest = level = in_string = 0
    for start in range(0, len(marks), _CHUNK):
        part = marks[start : start + _CHUNK]
        inside = (np.cumsum(part == ord('"'), dtype=np.int32) + in_string) & 1
        levels = np.cumsum(_STEP[part] * (1 - inside), dtype=np.int32) + level
        deepest = max(deepest, int(levels.max()))
        level, in_string = int(levels[-1]), int(inside[-1])
    return deepest


# What to tell the client

_AT = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$(.*)`)?", re.DOTALL)
_WANTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_BOUND = re.compile(r"Expected `(int|float)` (?:[<>]=?) ")
_LENGTH = re.compile(r"Expected `(\w+)` of length (<=|>=)? ?(\d+)")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_WORDS: Final = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean", "array": "a list",
    "object": "an object", "null": "null",
}  # fmt: skip
_UNITS: Final = {"array": "entries", "object": "entries", "str": "characters"}


def explain(error: msgspec.DecodeError, data: bytes, wanted: Any, param: str = "") -> InvalidRequest:
    """msgspec's error in this API's words. `wanted`: the type asked for; `param`: the field that `data` is, if any."""
    if not isinstance(error, msgspec.ValidationError):
        return _syntax(str(error), data, param)
    found = _AT.fullmatch(str(error))
    message, path = (found[1], found[2] or "") if found else ("", "")
    where = (param + path.replace("[...]", "")).lstrip(".")
    subject = where or "the request body"
    if missing := _MISSING.match(message):
        where = f"{where}.{missing[1]}".lstrip(".")
        return InvalidRequest(f"{where} is required", param=where, code="missing_required_parameter")
    if types := _WANTED.match(message):
        if types[1] == "null":
            return unsupported(where)
        options = " or ".join(_WORDS.get(t, t) for t in types[1].split(" | ") if t != "null")
        text = f"{subject} must be {options}, not {_WORDS.get(types[2], types[2])}"
        return InvalidRequest(text, param=where or None, code="invalid_type")
    if length := _LENGTH.match(message):
        relation = {"<=": "at most ", ">=": "at least ", None: "exactly "}[length[2]]
        text = f"{subject} must have {relation}{length[3]} {_UNITS.get(length[1], 'entries')}"
        return InvalidRequest(text, param=where or None)
    if _BOUND.match(message):
        text = _bounds(wanted, where) or message.replace("Expected", "wanted is").replace("`", "")
        return InvalidRequest(f"{subject} is out of range: {text}", param=where or None)
    return InvalidRequest(f"{subject} is out of range", param=where or None)


def unsupported(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is not supported by this engine", param=param, code="unsupported_parameter")


def _syntax(message: str, data: bytes, param: str) -> InvalidRequest:
    path = _surrogate_path(data) if b"\\u" in data else None
    if path is not None:
        where = echo((param + path).lstrip("."))  # the keys are the client's
        return InvalidRequest(f"{where or 'the request body'} contains half of a surrogate pair", param=where or None)
    subject = param or "the request body"
    if message.startswith("JSON is malformed"):
        message = f"{subject} is not valid JSON" + message.removeprefix("JSON is malformed")
    elif "UTF-8" in message:
        message = f"{subject} is not valid UTF-8"
    else:
        message = f"{subject} is not valid JSON: it ends too early"
    return InvalidRequest(message, param=param or None)


def _check_utf8(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not valid UTF-8 (byte {error.start})") from None


def _surrogate_path(data: bytes) -> str | None:
    """Where the first string with a lone surrogate is: the standard library accepts them (RFC 8259 section 8.2)."""
    if len(data) > MAX_DIAGNOSED_BYTES:
        return None
    try:
        return _search(json.loads(data.decode()), "")
    except (ValueError, RecursionError):
        return None


def _search(value: object, path: str) -> str | None:
    if isinstance(value, str):
        return path if any(0xD800 <= ord(c) <= 0xDFFF for c in value) else None
    if isinstance(value, dict):
        if _search("".join(value), path) is not None:  # in a key: name the object
            return path
        items = [(f".{k}", v) for k, v in value.items()]
    elif isinstance(value, list):
        items = [(f"[{i}]", v) for i, v in enumerate(value)]
    else:
        return None
    return next((p for step, v in items if (p := _search(v, path + step)) is not None), None)


@functools.lru_cache(maxsize=64)
def _bounds(wanted: Any, field: str) -> str | None:
    """A top-level field's range in words, from the type that checks it."""
    for candidate in getattr(msgspec.inspect.type_info(wanted), "fields", ()):
        if candidate.encode_name == field:
            options = getattr(candidate.type, "types", (candidate.type,))
            number = next(o for o in options if isinstance(o, (msgspec.inspect.IntType, msgspec.inspect.FloatType)))
            low = f"at least {number.ge}" if number.ge is not None else f"greater than {number.gt}"
            return f"it must be {low} and at most {number.le}" if number.le is not None else f"it must be {low}"
    return None
