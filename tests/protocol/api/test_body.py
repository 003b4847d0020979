"""Bodies that do not fit: what is said, where, and how little of the input is repeated."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from evap.errors import InvalidRequest
from evap.protocol.api import body as body_module
from evap.protocol.api.body import MAX_DEPTH, check_depth, decode, decode_small, is_set

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=30,
)


class Inner(msgspec.Struct):
    text: str


class Sample(msgspec.Struct):
    items: list[Inner]
    ratio: Annotated[float, Meta(gt=0, le=1)] | None = None
    count: Annotated[int, Meta(ge=1)] | None = None
    names: Annotated[list[str], Meta(max_length=2)] | None = None
    either: str | list[str] | None = None
    refused: None = None
    anything: dict[str, Any] | None = None
    raw: msgspec.Raw = body_module.ABSENT


DECODER = msgspec.json.Decoder(Sample)


def refusal(data: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(data, DECODER)
    return caught.value


@pytest.mark.parametrize(
    ("data", "param", "message"),
    [
        (b"", None, "the request body is empty; send a JSON object"),
        (b"[]", None, "the request body must be an object, not a list"),
        (b"null", None, "the request body must be an object, not null"),
        (b"{}", "items", "items is required"),
        (b'{"items":[{}]}', "items[0].text", "items[0].text is required"),
        (b'{"items":[{"text":"a"},{"text":5}]}', "items[1].text", "items[1].text must be a string, not an integer"),
        (b'{"items":[],"ratio":true}', "ratio", "ratio must be a number, not a boolean"),
        (b'{"items":[],"ratio":"1"}', "ratio", "ratio must be a number, not a string"),
        (b'{"items":[],"ratio":0}', "ratio", "ratio is out of range: it must be greater than 0 and at most 1"),
        (b'{"items":[],"ratio":1e400}', "ratio", "ratio is out of range"),
        (b'{"items":[],"count":1.0}', "count", "count must be an integer, not a number"),
        (b'{"items":[],"count":0}', "count", "count is out of range: it must be at least 1"),
        (b'{"items":[],"count":-99999999999999999999}', "count", "count is out of range: it must be at least 1"),
        (b'{"items":[],"names":["a","b","c"]}', "names", "names must have at most 2 entries"),
        (b'{"items":[],"either":{}}', "either", "either must be a string or a list, not an object"),
        (b'{"items":[],"refused":{"a":1}}', "refused", "refused is not supported by this engine"),
        (b'{"items":[],"ratio":NaN}', None, "the request body is not valid JSON: invalid character (byte 20)"),
        (b'{"items":[', None, "the request body is not valid JSON: it ends too early"),
        (b'{"items":[]} {}', None, "the request body is not valid JSON: trailing characters (byte 14)"),
        (b'{"items":[],"either":"\xff"}', None, "the request body is not valid UTF-8"),
        (b'{"items":[],"skipped":"\xff"}', None, "the request body is not valid UTF-8 (byte 23)"),
        (b'\xef\xbb\xbf{"items":[]}', None, "the request body is not valid JSON: invalid character (byte 0)"),
    ],
)
def test_refusals(data: bytes, param: str | None, message: str) -> None:
    error = refusal(data)
    assert (error.param, error.message) == (param, message)


@pytest.mark.parametrize("escape", ["\\ud83d", "\\ude00", "\\ude00\\ud83d", "\\ud83dabc", "\\ud83d\\u0041", "\\uD83D "])
@pytest.mark.parametrize(
    ("template", "path"),
    [
        ('{"items":[{"text":"x"},{"text":"%s"}]}', "items[1].text"),
        ('{"items":[],"either":["a","%s"]}', "either[1]"),
        ('{"items":[],"anything":{"a":{"b":"%s"}}}', "anything.a.b"),
        ('{"items":[],"anything":{"%s":1}}', "anything"),
        ('{"items":[],"unknown":"%s"}', "unknown"),
    ],
)
def test_half_a_surrogate_pair_is_refused_with_its_path(escape: str, template: str, path: str) -> None:
    error = refusal((template % escape).encode())
    assert error.param == path
    assert "surrogate" in error.message


def test_whole_surrogate_pairs_and_escaped_backslashes_are_text() -> None:
    value = decode(b'{"items":[{"text":"\\ud83d\\ude00 \\\\ud83d"}]}', DECODER)
    assert value.items[0].text == "\U0001f600 \\ud83d"


def test_long_paths_are_cut() -> None:
    deep: Any = "\ud83d"
    for _ in range(30):
        deep = {"K" * 50: deep}
    error = refusal(json.dumps({"items": [], "anything": deep}).encode())
    assert len(error.message.encode()) < 128
    assert len((error.param or "").encode()) <= 64


def test_surrogates_in_huge_bodies_are_refused_without_a_path() -> None:
    data = b'{"items":[],"unknown":"' + b"x" * body_module.MAX_SCANNED_BYTES + b'","either":"\\ud83d"}'
    assert "not valid JSON" in refusal(data).message


def test_duplicate_keys_the_last_one_counts() -> None:
    assert decode(b'{"items":[],"count":1,"count":2}', DECODER).count == 2


# Nesting


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(v) for v in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(v) for v in value), default=0)
    return 0


@given(JSON)
def test_depth_is_the_depth(value: Any) -> None:
    for ascii_only in (True, False):
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert body_module._depth(data) == depth_of(value)


@given(st.lists(st.sampled_from(['"', "\\", "[", "]", "{", "}", "n", "é"]), max_size=30).map("".join))
def test_brackets_in_strings_do_not_count(text: str) -> None:
    assert body_module._depth(json.dumps([[text], {text: text}]).encode()) == 2


def test_depth_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps({"a[": [1, {"b{": ["]]", '"[', [2]]}], "c": [[[[[[]]]]]]}).encode()
    for chunk in range(1, 12):
        monkeypatch.setattr(body_module, "_CHUNK", chunk)
        assert body_module._depth(data) == 7


@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_the_limit_is_exact(pair: str) -> None:
    opening = pair[0] if pair == "[]" else '{"a":'
    check_depth((opening * MAX_DEPTH + "1" + pair[1] * MAX_DEPTH).encode())
    with pytest.raises(InvalidRequest, match="deeper than 64"):
        check_depth((opening * (MAX_DEPTH + 1) + "1" + pair[1] * (MAX_DEPTH + 1)).encode())


@pytest.mark.parametrize("depth", [64, 3_000, 500_000])
def test_deep_bodies_are_refused_wherever_they_are_deep(depth: int) -> None:
    for field in ("anything", "unknown"):
        data = b'{"items":[],"%b":%b%b}' % (field.encode(), b"[" * depth, b"]" * depth)
        assert "deeper than 64" in refusal(data).message


def test_in_large_bodies_the_parser_s_own_limit_holds() -> None:
    depth = body_module.MAX_SCANNED_BYTES
    for field in ("raw", "unknown"):
        data = b'{"items":[],"%b":%b%b}' % (field.encode(), b"[" * depth, b"]" * depth)
        assert "deeper than 64" in refusal(data).message
    padded = b'{"items":[],"padding":"%b","unknown":%b%b}' % (b"x" * depth, b"[" * 100, b"]" * 100)
    assert decode(padded, DECODER).items == []  # skipped, and harmless


@pytest.mark.parametrize("size", [100, 4095, 4096, 70_000, 200_000])
def test_brackets_are_counted_in_small_and_large_bodies(size: int) -> None:
    for bracket in (b"[", b"{"):
        few = b"x" * (size - 64) + bracket * 64
        assert not body_module._many_brackets(few)
        assert body_module._many_brackets(bracket + few)
        assert body_module._many_brackets(few + bracket)
    assert not body_module._many_brackets(b"];}\x0b\x5a\x7a" * (size // 6))


def test_deep_raw_fields_are_refused_before_they_are_decoded() -> None:
    raw = msgspec.Raw(b"[" * 65 + b"]" * 65)
    with pytest.raises(InvalidRequest, match="raw is nested deeper than 64 levels") as caught:
        decode_small(raw, msgspec.json.Decoder(list[Any]), "raw", 1000)
    assert caught.value.param == "raw"


def test_deep_and_broken_is_still_our_error() -> None:
    refusal(b'{"items":[],"unknown":"' + b"[{" * 100_000)
    refusal(b'"' + b"[" * 100_000)
    # an escaped quote outside a string: the scan sees shallow JSON, the decoder sees nonsense
    refusal(b'\\"' + b"[" * 100_000)


# Raw fields


def test_raw_fields_are_measured_before_they_are_decoded() -> None:
    decoder = msgspec.json.Decoder(list[str])
    value = decode(b'{"items":[],"raw": ["a", "b"] }', DECODER)
    assert is_set(value.raw)
    assert decode_small(value.raw, decoder, "raw", 100) == ["a", "b"]
    with pytest.raises(InvalidRequest, match="raw is too large: 10 bytes of JSON, at most 9") as caught:
        decode_small(value.raw, decoder, "raw", 9)
    assert caught.value.param == "raw"
    with pytest.raises(InvalidRequest, match=r"raw\[1\] must be a string, not an integer"):
        decode_small(msgspec.Raw(b'["a",1]'), decoder, "raw", 100)


def test_null_and_absent_raw_fields_are_not_set() -> None:
    assert not is_set(decode(b'{"items":[],"raw":null}', DECODER).raw)
    assert not is_set(decode(b'{"items":[]}', DECODER).raw)
    assert is_set(decode(b'{"items":[],"raw":[]}', DECODER).raw)
