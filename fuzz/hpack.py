"""Invariant: any header blocks, one after the other on one connection, are decoded as hpack decodes them, with the same
dynamic table; within evap's limits a list is the same, or refused with an error that is documented. The table never
holds more than it may."""

from __future__ import annotations

import contextlib

from hpack import Decoder
from hpack.exceptions import HPACKError

from evap.protocol.hpack_in import Fields, OversizedList, RequestDecoder
from fuzz.runner import main

TABLE = 4096
LIMIT, FIELDS = 1024, 16


def blocks(data: bytes) -> list[bytes]:
    """Each with its length in front, in one octet; the last may be cut."""
    found = []
    while data:
        size, data = data[0], data[1:]
        found.append(data[:size])
        data = data[size:]
    return found


def within_limits(decoder: RequestDecoder, block: bytes) -> Fields | None:
    """None: refused, and decoding can go on. Raises HPACKError: the connection ends."""
    try:
        return decoder.fields(block)
    except OversizedList:
        return None


def one_input(data: bytes) -> None:
    stock, wide, narrow = Decoder(1 << 20), RequestDecoder(1 << 20, 1 << 20), RequestDecoder(LIMIT, FIELDS)
    for block in blocks(data):
        expected: Fields | None = None
        ours: Fields | None = None
        with contextlib.suppress(HPACKError):
            expected = [(bytes(name), bytes(value)) for name, value in stock.decode(block, raw=True)]
        try:
            ours = wide.fields(block)
            limited = within_limits(narrow, block)
        except HPACKError:
            limited = ours
        assert ours == expected, "not what hpack says"
        if expected is None:
            return
        assert wide.header_table.dynamic_entries == stock.header_table.dynamic_entries
        assert wide.header_table._current_size <= TABLE
        assert limited is None or limited == expected
        small = sum(len(n) + len(v) + 32 for n, v in expected) <= LIMIT and len(expected) <= FIELDS
        assert limited == expected or not small, "refused within the limits"


if __name__ == "__main__":
    main(one_input, "hpack")
