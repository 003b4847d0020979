"""Our encoder: any decoder reads it, none keeps anything, and only vetted fields come out."""

from __future__ import annotations

import pytest
from hpack import Decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.protocol import hpack_out
from evap.protocol.headers import BadHeader

NAMES = st.from_regex(rb"\A[a-z0-9!#$%&'*+.^_`|~-]{1,200}\Z").filter(
    lambda n: (
        n
        not in (b"te", b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b"trailer")
    )
)
VALUES = st.binary(max_size=400).filter(
    lambda v: v == v.strip(b" \t") and not any((c < 32 and c != 9) or c == 127 for c in v)
)


@given(st.lists(st.tuples(st.one_of(NAMES, st.sampled_from([b"content-type", b"date"])), VALUES), max_size=8))
@settings(max_examples=40)
def test_fields_survive_and_leave_no_state(fields: list[tuple[bytes, bytes]]) -> None:
    decoder = Decoder()
    decoder.max_allowed_table_size = 0
    block = hpack_out.NO_TABLE + hpack_out.status(200) + hpack_out.block(fields)
    assert [tuple(pair) for pair in decoder.decode(block, raw=True)] == [(b":status", b"200"), *fields]
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize("code", [100, 200, 204, 304, 404, 413, 418, 503, 599])
def test_every_status(code: int) -> None:
    assert [tuple(pair) for pair in Decoder().decode(hpack_out.status(code), raw=True)] == [(b":status", b"%d" % code)]


@pytest.mark.parametrize("code", [0, 99, 600, -1])
def test_no_such_status(code: int) -> None:
    with pytest.raises(ValueError, match="status"):
        hpack_out.status(code)


def test_static_pairs_are_one_octet() -> None:
    assert hpack_out.status(200) == b"\x88"
    assert hpack_out.field(b"accept-encoding", b"gzip, deflate") == b"\x90"


@given(st.integers(0, 1 << 28), st.integers(4, 7))
def test_integers(value: int, prefix: int) -> None:
    from hpack.hpack import decode_integer

    assert decode_integer(hpack_out.integer(value, prefix, 0), prefix) == (
        value,
        len(hpack_out.integer(value, prefix, 0)),
    )


def test_the_memory_of_fields_is_bounded() -> None:
    for number in range(3 * hpack_out.MEMO_ENTRIES):
        hpack_out.field(b"x-request-id", b"%d" % number)
    assert len(hpack_out._fields) <= hpack_out.MEMO_ENTRIES


def test_bad_fields_are_refused_every_time() -> None:
    for _ in range(2):
        with pytest.raises(BadHeader):
            hpack_out.block([(b"x", b"a\nb")])
