"""HPACK encoding (RFC 7541) for response headers: static table and literals without indexing, so there is no state.

An encoder without a dynamic table cannot get out of step with the client, needs no memory per connection, and makes
every field's octets a constant that is made (and vetted) once.
"""

from __future__ import annotations

from typing import Final

from hpack.table import HeaderTable

from evap.protocol.events import HeaderList
from evap.protocol.headers import vet_field

_PAIRS: Final[dict[tuple[bytes, bytes], int]] = {
    pair: i for i, pair in reversed(list(enumerate(HeaderTable.STATIC_TABLE, 1)))
}
_NAMES: Final[dict[bytes, int]] = {pair[0]: i for i, pair in reversed(list(enumerate(HeaderTable.STATIC_TABLE, 1)))}

#: "Dynamic table size update: 0" (RFC 7541 6.3): sent before the first block after a client set its
#: HEADER_TABLE_SIZE. Zero is within whatever it allows, now and later, and the table is never used.
NO_TABLE: Final = b"\x20"

MEMO_ENTRIES: Final = 2048
_fields: dict[tuple[bytes, bytes], bytes] = {}
_statuses: dict[int, bytes] = {}


def integer(value: int, prefix_bits: int, first: int) -> bytes:
    """RFC 7541 5.1; `first` carries the bits before the prefix."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((first | value,))
    out = bytearray((first | most,))
    value -= most
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _literal(name: bytes, value: bytes) -> bytes:
    index = _NAMES.get(name, 0)
    head = integer(index, 4, 0) if index else b"\x00" + integer(len(name), 7, 0) + name
    return head + integer(len(value), 7, 0) + value


def field(name: bytes, value: bytes) -> bytes:
    """One field's octets. Raises BadHeader if it must not be sent."""
    known = _fields.get((name, value))
    if known is None:
        vet_field(name, value)
        index = _PAIRS.get((name, value))
        known = integer(index, 7, 0x80) if index else _literal(name, value)
        if len(_fields) >= MEMO_ENTRIES:
            _fields.clear()
        _fields[(name, value)] = known
    return known


def status(code: int) -> bytes:
    """The :status field. code: 100..599."""
    known = _statuses.get(code)
    if known is None:
        if not 100 <= code <= 599:
            raise ValueError(f"status {code}")
        value = b"%d" % code
        index = _PAIRS.get((b":status", value))
        known = _statuses[code] = integer(index, 7, 0x80) if index else _literal(b":status", value)
    return known


#: The whole block of an interim 100 response (RFC 9110 15.2.1).
CONTINUE: Final = status(100)


def promised(scheme: bytes, authority: bytes, path: bytes) -> bytes:
    """The block of a GET that is promised (RFC 9113 8.4). All three are ASCII that was vetted, or made by us. The path
    is never indexed (RFC 7541 7.1.3): who knows it may have the answer."""
    made = b"\x82" + integer(_PAIRS[(b":scheme", scheme)], 7, 0x80)
    where = integer(_NAMES[b":authority"], 4, 0) + integer(len(authority), 7, 0) + authority
    return made + where + integer(_NAMES[b":path"], 4, 0x10) + integer(len(path), 7, 0) + path


def block(headers: HeaderList) -> bytes:
    """Octets of an ordinary field list (trailers, or a response head after its :status)."""
    return b"".join([field(name, value) for name, value in headers])
