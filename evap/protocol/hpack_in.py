"""HPACK decoding (RFC 7541) for request headers: hpack's tables and Huffman code, our own loop.

hpack's decoder costs about 16 us a request and cannot say "too large" without losing the connection. This one goes over
the same table (h2 takes it as its public `decoder` attribute), remembers decoded strings, and counts a list that is too
large to its end, so that it can be answered with 431. The tests hold it against hpack's own, block for block.
"""

from __future__ import annotations

from typing import Final

from hpack import Decoder
from hpack.exceptions import HPACKDecodingError, InvalidTableSizeError, OversizedHeaderListError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

Fields = list[tuple[bytes, bytes]]

STATIC: Final[tuple[tuple[bytes, bytes], ...]] = HeaderTable.STATIC_TABLE
STATIC_LENGTH: Final = len(STATIC)
#: Octets per field besides name and value, in the size of a header list (RFC 9113 10.5.1) and of the table.
OVERHEAD: Final = 32
#: Longest Huffman string that is remembered, and how many; one table for the process (strings hold no state).
MEMO_STRING: Final = 64
MEMO_ENTRIES: Final = 1024
#: Whole blocks remembered per connection, while the dynamic table stays as it is.
MEMO_BLOCKS: Final = 8

_strings: dict[bytes, bytes] = {}


class OversizedList(Exception):
    """The list is over the limit; decoding went on to the end, so the compression context is intact."""


def _huffman(data: bytes) -> bytes:
    text = _strings.get(data)
    if text is None:
        text = decode_huffman(data)
        if len(data) <= MEMO_STRING:
            if len(_strings) >= MEMO_ENTRIES:
                _strings.clear()
            _strings[data] = text
    return text


def _integer(data: bytes, at: int, mask: int) -> tuple[int, int]:
    """(value, next position) of an integer with a prefix (RFC 7541 5.1). At most four more octets, as in hpack."""
    value = data[at] & mask
    at += 1
    if value < mask:
        return value, at
    shift = 0
    while True:
        octet = data[at]
        at += 1
        value += (octet & 0x7F) << shift
        if octet < 0x80:
            return value, at
        shift += 7
        if shift > 28:
            raise HPACKDecodingError("integer too long")


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    octet = data[at]
    length = octet & 0x7F
    if length == 0x7F:
        length, at = _integer(data, at, 0x7F)
    else:
        at += 1
    end = at + length
    if end > len(data):
        raise HPACKDecodingError("truncated string")
    text = data[at:end]
    return (_huffman(text) if octet & 0x80 else text), end


class RequestDecoder(Decoder):
    """Drop-in for `hpack.Decoder` on an h2 connection; h2 sets `max_allowed_table_size` and `max_header_list_size`.

    factor: a list so many times over a limit is an attack, not a mistake: an error of the connection. table: octets.
    Raises hpack's errors, which h2 turns into connection errors, and OversizedList (only out of `fields`).
    """

    def __init__(self, max_list_bytes: int, max_fields: int, *, factor: int = 4, table: int = 4096) -> None:
        super().__init__(max_list_bytes)
        self.max_allowed_table_size = table
        self._most_bytes, self._most_over = factor * max_list_bytes, factor * max_fields
        self._limit = max_list_bytes
        self._max_fields = max_fields
        self._blocks: dict[bytes, Fields] = {}
        self._mark: tuple[object, int, int] = (None, 0, 0)

    def limit_table(self, size: int) -> None:
        """From now on the table has at most so many octets; blocks are looked at again."""
        if size != self.max_allowed_table_size:
            self.max_allowed_table_size = size
            self._blocks.clear()

    def decode(self, data: bytes, raw: bool = False) -> Fields:  # type: ignore[override]
        """hpack's entry point, for h2's own use (always raw); too large is an error of the connection there."""
        try:
            return self.fields(bytes(data))
        except OversizedList as error:
            raise OversizedHeaderListError(str(error)) from error

    def fields(self, block: bytes) -> Fields:
        """The header list. Raises OversizedList, or hpack's errors after which the connection must end.

        The returned list may be returned again for an equal block: do not change it.
        """
        table = self.header_table
        entries = table.dynamic_entries
        mark = (entries[0] if entries else None, len(entries), table.maxsize)
        last = self._mark
        if mark[0] is last[0] and mark[1:] == last[1:]:
            known = self._blocks.get(block)
            if known is not None:
                return known
        else:
            self._blocks.clear()
            self._mark = mark
        fields = self._walk(block)
        after = entries[0] if entries else None
        if after is mark[0] and len(entries) == mark[1] and table.maxsize == mark[2]:
            if len(self._blocks) >= MEMO_BLOCKS:
                self._blocks.clear()
            self._blocks[block] = fields
        return fields

    def _walk(self, data: bytes) -> Fields:
        found: Fields = []
        over = size = at = 0
        end = len(data)
        try:
            while at < end:
                first = data[at]
                if first & 0x80:
                    index, at = _integer(data, at, 0x7F)
                    field = STATIC[index - 1] if 0 < index <= STATIC_LENGTH else self._entry(index)
                elif 0x20 <= first < 0x40:
                    if found or over:
                        raise HPACKDecodingError("table size update after a field")
                    at = self._resize(data, at)
                    continue
                else:
                    field, at = self._literal(data, at, first)
                size += len(field[0]) + len(field[1]) + OVERHEAD
                if size > self._limit or len(found) >= self._max_fields:
                    over += 1
                    if size > self._most_bytes or over > self._most_over:
                        raise OversizedHeaderListError("header list far over the limit")
                else:
                    found.append(field)
        except IndexError as error:
            raise HPACKDecodingError("truncated header block") from error
        if self.header_table.maxsize > self.max_allowed_table_size:
            raise InvalidTableSizeError("table not shrunk to the limit")
        if over:
            raise OversizedList("header list over the limit")
        return found

    def _literal(self, data: bytes, at: int, first: int) -> tuple[tuple[bytes, bytes], int]:
        indexing = first & 0x40
        index, at = _integer(data, at, 0x3F if indexing else 0x0F)
        if index == 0:
            name, at = _string(data, at)
        elif index <= STATIC_LENGTH:
            name = STATIC[index - 1][0]
        else:
            name = self._entry(index)[0]
        value, at = _string(data, at)
        if indexing:
            self.header_table.add(name, value)
        return (name, value), at

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        found: tuple[bytes, bytes] = self.header_table.get_by_index(index)
        return found

    def _resize(self, data: bytes, at: int) -> int:
        size, at = _integer(data, at, 0x1F)
        if size > self.max_allowed_table_size:
            raise InvalidTableSizeError("table size update over the limit")
        self.header_table_size = size
        return at
