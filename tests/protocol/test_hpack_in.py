"""Our decoder against hpack's own: same lists, same tables, errors on the same blocks."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.protocol.hpack_in import STATIC, OversizedList, RequestDecoder

LIMIT, FIELDS = 16_384, 64
NAMES = st.one_of(st.sampled_from([name for name, _ in STATIC]), st.binary(max_size=12))
VALUES = st.one_of(st.sampled_from([b"", b"GET", b"gzip, deflate", b"application/json"]), st.binary(max_size=40))
LISTS = st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=12)


@given(st.lists(st.tuples(LISTS, st.booleans(), st.sampled_from([None, 0, 64, 200, 4096])), max_size=10))
@settings(max_examples=40)
def test_a_conversation_decodes_as_hpack_does(
    blocks: list[tuple[list[tuple[bytes, bytes, bool]], bool, int | None]],
) -> None:
    encoder, stock, ours = Encoder(), Decoder(), RequestDecoder(LIMIT, FIELDS)
    for fields, huffman, resize in blocks:
        if resize is not None:
            encoder.header_table_size = resize
        for _ in range(3):  # from the second time on it may be all indices, and come from memory
            block = encoder.encode(fields, huffman=huffman)
            expected = [tuple(field) for field in stock.decode(block, raw=True)]
            assert ours.fields(block) == expected
            assert ours.header_table.dynamic_entries == stock.header_table.dynamic_entries
            assert ours.header_table.maxsize == stock.header_table.maxsize


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_decode_as_hpack_does(blocks: list[bytes]) -> None:
    stock, ours = Decoder(), RequestDecoder(1 << 20, 10_000)
    for block in blocks:
        try:
            expected = [tuple(field) for field in stock.decode(block, raw=True)]
        except HPACKError:
            with pytest.raises(HPACKError):
                ours.fields(block)
            return
        assert ours.fields(block) == expected
        assert ours.header_table.dynamic_entries == stock.header_table.dynamic_entries


def test_a_repeated_block_is_remembered_until_the_table_changes() -> None:
    encoder, ours = Encoder(), RequestDecoder(LIMIT, FIELDS)
    ours.fields(encoder.encode([(b"x-one", b"1")]))
    block = encoder.encode([(b"x-one", b"1")])  # an index now
    first = ours.fields(block)
    assert ours.fields(block) is first
    ours.fields(encoder.encode([(b"x-two", b"2")]))
    assert ours.fields(block) == [(b"x-two", b"2")]  # the same index means another entry


def test_a_list_over_the_limit_is_decoded_to_its_end() -> None:
    encoder, ours = Encoder(), RequestDecoder(1000, FIELDS)
    with pytest.raises(OversizedList):
        ours.fields(encoder.encode([(b"x-large", b"v" * 960), (b"x-after", b"1")]))
    assert ours.fields(encoder.encode([(b"x-after", b"1")])) == [(b"x-after", b"1")]
    with pytest.raises(OversizedList):
        ours.fields(encoder.encode([(b"a", b"")] * (FIELDS + 1)))


def test_a_list_far_over_the_limit_is_not() -> None:
    with pytest.raises(OversizedHeaderListError):
        RequestDecoder(1000, FIELDS).fields(b"\x82" * 200)
    with pytest.raises(OversizedHeaderListError):
        RequestDecoder(1 << 20, 10).fields(b"\x82" * 51)


def test_as_a_drop_in_an_oversized_list_is_hpacks_error() -> None:
    with pytest.raises(OversizedHeaderListError):
        RequestDecoder(100, FIELDS).decode(Encoder().encode([(b"x", b"v" * 100)]), raw=True)


def test_a_table_that_was_not_shrunk() -> None:
    ours = RequestDecoder(LIMIT, FIELDS)
    ours.max_allowed_table_size = 100
    with pytest.raises(HPACKError):
        ours.fields(b"\x82")
    assert ours.fields(b"\x3f\x45\x82") == [(b":method", b"GET")]  # size update to 100 first
