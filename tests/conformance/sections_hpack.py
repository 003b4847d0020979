"""Checks of RFC 7541 (HPACK), section by section: every representation is understood, and what is none is refused."""

from __future__ import annotations

from typing import Final

from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from evap.protocol import headers as code
from tests.conformance.checks import Check, answered, check, goaway
from tests.protocol import frames as f

REFUSED: Final = goaway(code.COMPRESSION_ERROR)
AGENT: Final = 58  # user-agent in the static table
_HUFFMAN: Final = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
FORMS: Final = {"with incremental indexing": (0x40, 6), "without indexing": (0x00, 4), "never indexed": (0x10, 4)}


def integer(first: int, bits: int, value: int) -> bytes:
    """RFC 7541 5.1."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((first | value,))
    out, value = bytearray((first | most,)), value - most
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def string(text: bytes, huffman: bool) -> bytes:
    """RFC 7541 5.2."""
    coded = _HUFFMAN.encode(text) if huffman else text
    return integer(0x80 if huffman else 0, 7, len(coded)) + coded


def literal(form: str, name: int | bytes, value: bytes, *, huffman: bool) -> bytes:
    """RFC 7541 6.2: the name by index, or as a string."""
    first, bits = FORMS[form]
    if isinstance(name, int):
        return integer(first, bits, name) + string(value, huffman)
    return bytes((first,)) + string(name, huffman) + string(value, huffman)


def get(sid: int, *, front: bytes = b"", back: bytes = b"") -> bytes:
    return f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, sid, front + f.block(f.GET) + back)


def representations() -> list[Check]:
    found = []
    for form in FORMS:
        for name, which in ((AGENT, "indexed name"), (b"x-new", "new name")):
            for huffman in (False, True):
                what = f"literal {form}, {which}{', Huffman' if huffman else ''}"
                field = literal(form, name, b"value", huffman=huffman)
                found.append(check("7541 6.2", what, answered(1, 3), get(1, back=field) + get(3, back=field)))
    return found


EOS: Final = b"\x00\x84\xff\xff\xff\xff\x00"
HPACK: Final[tuple[Check, ...]] = (
    check("7541 2.3.3", "an index past both tables", REFUSED, get(1, back=b"\xff\x0a")),
    check("7541 2.3.3", "a literal whose name's index is past both tables", REFUSED, get(1, back=b"\x7f\x0a\x01x")),
    check("7541 2.3.2", "an entry of the dynamic table", answered(1, 3),
          get(1, back=literal("with incremental indexing", b"x-a", b"b", huffman=False)) + get(3, back=b"\xbe")),
    check("7541 4.2", "a size update after the fields", REFUSED, get(1, back=b"\x20")),
    check("7541 5.2", "Huffman padding of more than 7 bits", REFUSED,
          get(1, back=b"\x00\x86\xf2\xb2\x4a\x84\xff\xff\x01a")),
    check("7541 5.2", "Huffman padding that is not EOS", REFUSED, get(1, back=b"\x00\x81\x18\x01a")),
    check("7541 5.2", "Huffman with EOS", REFUSED, get(1, back=EOS)),
    check("7541 6.1", "an indexed field", answered(1), get(1, back=b"\x90")),  # accept-encoding: gzip, deflate
    check("7541 6.1", "index 0", REFUSED, get(1, back=b"\x80")),
    *representations(),
    check("7541 6.3", "a size update", answered(1), get(1, front=b"\x20")),
    check("7541 6.3", "several size updates", answered(1), get(1, front=b"\x20\x3f\x45")),
    check("7541 6.3", "a size update above the limit", REFUSED, get(1, front=b"\x3f\xe2\x1f")),
)  # fmt: skip
