"""Request heads: what is malformed is in tests/conformance; here is what a good one becomes."""

from __future__ import annotations

import pytest
from h2.exceptions import ProtocolError
from h2.utilities import HeaderValidationFlags, validate_headers
from hypothesis import given
from hypothesis import strategies as st

from evap.errors import ExpectationFailed, InvalidRequest
from evap.protocol.request_head import Head, Malformed, check_trailers, parse

BASE = [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"Node:1"), (b":path", b"/v1/x?a=1?b")]


def head(*more: tuple[bytes, bytes], ended: bool = False) -> Head:
    return parse([*BASE, *more], peer="p", ended=ended)


def test_the_parts() -> None:
    got = head((b"x-a", b"1"), (b"x-a", b"2"), (b"content-length", b"007")).head
    assert (got.method, got.scheme, got.authority, got.path, got.query) == ("POST", "https", "Node:1", "/v1/x", "a=1?b")
    assert (got.version, got.peer) == ("2", "p")
    assert got.get(b"x-a") == b"1"
    assert got.headers == [(b"x-a", b"1"), (b"x-a", b"2"), (b"content-length", b"007")]
    assert head((b"content-length", b"007")).length == 7


def test_any_order_of_pseudo_header_fields() -> None:
    for order in (BASE[::-1], BASE[2:] + BASE[:2]):
        assert parse(order, peer="p", ended=True).head == parse(BASE, peer="p", ended=True).head


def test_expectations() -> None:
    assert head((b"expect", b"100-Continue")).wants_continue
    assert not head((b"expect", b"100-continue"), ended=True).wants_continue
    other = head((b"expect", b"200-ok"))
    assert isinstance(other.refusal, ExpectationFailed)
    assert not other.wants_continue


def test_other_schemes_are_refused_with_a_status() -> None:
    got = parse([BASE[0], (b":scheme", b"gopher"), *BASE[2:]], peer="p", ended=True)
    assert isinstance(got.refusal, InvalidRequest)


def test_host_stands_in_for_authority() -> None:
    assert parse([*BASE[:2], BASE[3], (b"host", b"h")], peer="p", ended=True).head.authority == "h"
    assert parse([*BASE[:2], BASE[3]], peer="p", ended=True).head.authority == ""


@pytest.mark.parametrize("value", [b"0", b"18446744073709551616", b"9" * 4300])
def test_lengths(value: bytes) -> None:
    length = head((b"content-length", value)).length
    assert length == min(int(value), 10**18)


def test_trailers() -> None:
    check_trailers([(b"x-checksum", b"1")])
    check_trailers([])
    with pytest.raises(Malformed):
        check_trailers([(b":path", b"/")])


FIELDS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([b"te", b"host", b"connection", b":path", b"x-a", b""]), st.binary(max_size=6)),
        st.one_of(st.sampled_from([b"trailers", b"Node:1", b"", b" x", b"x "]), st.binary(max_size=6)),
    ),
    max_size=5,
)


@given(FIELDS)
def test_whatever_h2_refuses_we_refuse(more: list[tuple[bytes, bytes]]) -> None:
    """h2's validation, which is switched off, is a lower bound (but for the case of host)."""
    fields = [*BASE, *more]
    flags = HeaderValidationFlags(is_client=False, is_trailer=False, is_response_header=False, is_push_promise=False)
    try:
        list(validate_headers(fields, flags))
    except ProtocolError:
        if any(name == b"host" and value.lower() == b"node:1" != value for name, value in more):
            return
        with pytest.raises(Malformed):
            parse(fields, peer="p", ended=False)
