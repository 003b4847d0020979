"""A JSON body -> a typed struct, in one pass; and what to tell a client whose body does not fit.

Rules:
1. Types are strict (RFC 8259 JSON, msgspec's strict mode): "5", 5.0 and true are not integers; NaN is not JSON.
2. A message names the field (`messages[3].content[0].text`) and what is wanted. It never quotes the value, except
   through `errors.echo` (64 bytes).
3. Whatever could be large for no good reason (stop strings, tools) is kept raw, measured, and only then decoded.
4. Of duplicate keys the last one counts. Unknown keys are skipped.
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
#: Up to this size a body is also scanned for what the parser lets pass in fields that it skips (deep nesting, invalid
#: UTF-8), and searched for the path of a lone surrogate. In larger bodies skipped fields have only the parser's own
#: limits: no such scan may hold up other streams.
MAX_SCANNED_BYTES: Final = 1 << 20
_CHUNK: Final = 64 << 10  # fits a core's L2 cache, with the arrays made of it

ABSENT: Final = msgspec.Raw(b"")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's struct. Raises InvalidRequest for anything else; time and memory are O(len(body))."""
    if not body:
        raise InvalidRequest("the request body is empty; send a JSON object")
    small = len(body) <= MAX_SCANNED_BYTES
    if small:
        check_depth(body)
    value = _decode(body, decoder, "")
    if small and not body.isascii():
        _check_utf8(body)  # the parser has looked at the strings it kept, not at those it skipped
    return value


def decode_field(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], param: str) -> T:
    """A field that was kept raw. Raises InvalidRequest if it is not of the decoder's type."""
    return _decode(bytes(raw), decoder, param)


def decode_small(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], param: str, max_bytes: int) -> T:
    """The same, but first refuse what is longer than `max_bytes` or too deep: nothing has been made of it then."""
    data = bytes(raw)
    if len(data) > max_bytes:
        raise InvalidRequest(f"{param} is too large: {len(data)} bytes of JSON, at most {max_bytes}", param=param)
    check_depth(data, param)
    return _decode(data, decoder, param)


def is_set(raw: msgspec.Raw) -> bool:
    """False for a raw field that is absent or null."""
    return bool(raw) and bytes(raw) != b"null"


def _decode(data: bytes, decoder: msgspec.json.Decoder[T], param: str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise explain(error, data, decoder.type, param) from None
    except RecursionError:  # the parser's own limit, about a thousand levels
        raise _too_deep(param) from None


# Nesting


def check_depth(data: bytes, param: str = "") -> None:
    """Refuse JSON nested deeper than MAX_DEPTH. Almost everything is cleared by its number of brackets."""
    if _many_brackets(data) and _depth(data) > MAX_DEPTH:
        raise _too_deep(param)


def _too_deep(param: str) -> InvalidRequest:
    text = f"{param or 'the request body'} is nested deeper than {MAX_DEPTH} levels"
    return InvalidRequest(text, param=param or None)


def _many_brackets(data: bytes) -> bool:
    """More than MAX_DEPTH opening brackets, in strings or not."""
    if len(data) < 4096:  # counting bytes is a nanosecond each; numpy costs 3 us to begin with, then a tenth of that
        return data.count(b"[") + data.count(b"{") > MAX_DEPTH
    array, count = np.frombuffer(data, np.uint8), 0
    for start in range(0, len(array), _CHUNK):
        count += int(np.count_nonzero((array[start : start + _CHUNK] | 0x20) == ord("{")))  # [ and { differ in one bit
        if count > MAX_DEPTH:
            return True
    return False


_NOT_KEPT: Final = bytes(b for b in range(256) if b not in b'[]{}"')
_STEPS: Final = bytes.maketrans(b'[{]}"', b"\x01\x01\xff\xff\x00")


def _depth(data: bytes) -> int:
    """Deepest nesting, for valid JSON (for other input some number). Vectorised: a few nanoseconds a byte."""
    if b"\\" in data:
        # Escapes stand in strings only, and a run of backslashes starts with an escaping one: drop pairs, then \".
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = data.translate(None, _NOT_KEPT)
    quotes, steps = np.frombuffer(kept, np.uint8) == ord('"'), np.frombuffer(kept.translate(_STEPS), np.int8)
    deepest = level = in_string = 0
    for start in range(0, len(kept), _CHUNK):
        part = slice(start, start + _CHUNK)
        inside = (np.cumsum(quotes[part], dtype=np.int32) + in_string) & 1
        levels = np.cumsum(steps[part] * (1 - inside), dtype=np.int32) + level
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
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
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
    if len(data) > MAX_SCANNED_BYTES:
        return None
    try:
        return _search(json.loads(data.decode()), "")
    except (ValueError, RecursionError):
        return None


def _search(value: object, path: str) -> str | None:
    if isinstance(value, str):
        return path if _SURROGATE.search(value) else None
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
