"""The table of errors is total, and our own fields are vetted."""

from __future__ import annotations

import json

import pytest

from evap import errors as e
from evap.protocol.headers import (
    ERRORS,
    BadHeader,
    DateCache,
    error_body,
    error_headers,
    vet,
    vet_field,
    wire_code,
)


def tree(cls: type[e.EvapError]) -> list[type[e.EvapError]]:
    return [cls, *[sub for child in cls.__subclasses__() for sub in tree(child)]]


def test_every_error_is_in_the_table() -> None:
    ours = [cls for cls in tree(e.EvapError) if cls.__module__ == "evap.errors"]
    assert set(ours) == set(ERRORS)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda c: c.__name__)
def test_rows_of_the_table_make_sense(cls: type[e.EvapError]) -> None:
    status, code = ERRORS[cls]
    assert 400 <= status <= 599
    assert 0 <= code <= 0xD
    if issubclass(cls, e.ClientError):
        assert status < 500
    if issubclass(cls, e.ServerError):
        assert status >= 500


def test_a_class_made_elsewhere_takes_its_parents_row() -> None:
    class Elsewhere(e.RateLimited):
        pass

    assert wire_code(Elsewhere("x")) == ERRORS[e.RateLimited]


def test_the_body_is_openais() -> None:
    error = e.InvalidRequest('no "model"', param="model", code="missing")
    assert json.loads(error_body(error)) == {
        "error": {"message": 'no "model"', "type": "invalid_request_error", "param": "model", "code": "missing"}
    }
    assert len(error_body(e.InvalidRequest("x" * 100_000))) < 1400


def test_headers_that_a_status_demands() -> None:
    json_type = (b"content-type", b"application/json")
    assert error_headers(e.NotFound("x")) == [json_type]
    assert error_headers(e.RateLimited("x", retry_after_s=0.2)) == [json_type, (b"retry-after", b"1")]
    assert error_headers(e.RateLimited("x", retry_after_s=7.2))[1] == (b"retry-after", b"8")
    assert error_headers(e.MethodNotAllowed("x", allow="GET, HEAD"))[1] == (b"allow", b"GET, HEAD")
    assert error_headers(e.Unauthenticated("x"))[1] == (b"www-authenticate", b"Bearer")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-id", b""),
        (b"x-id", b'a b\tc; d="e"'),
        (b"x!#$%&'*+-.^_`|~1", b"\x80\xff"),
    ],
)
def test_good_fields(name: bytes, value: bytes) -> None:
    vet([(name, value)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"", b"v"), (b"X", b"v"), (b"a b", b"v"), (b":status", b"200"), (b"a\n", b"v"), (b"connection", b"close"),
        (b"a", b"\x00"), (b"a", b"v\n"), (b"a", b"\rv"), (b"a", b"v\x7f"), (b"a", b" v"), (b"a", b"v\t"),
    ],
)  # fmt: skip
def test_bad_fields(name: bytes, value: bytes) -> None:
    with pytest.raises(BadHeader):
        vet_field(name, value)


def test_types_that_are_not_bytes() -> None:
    for name, value in (("a", b"v"), (b"a", "v"), (b"a", None), (b"a", 1), (bytearray(b"a"), b"v")):
        with pytest.raises(BadHeader):
            vet_field(name, value)  # type: ignore[arg-type]


def test_the_date_is_made_once_a_second() -> None:
    cache = DateCache()
    first = cache.at(0)
    assert first == b"Thu, 01 Jan 1970 00:00:00 GMT"
    assert cache.at(0) is first
    assert cache.at(1) == b"Thu, 01 Jan 1970 00:00:01 GMT"
