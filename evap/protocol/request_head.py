"""RFC 9113 section 8: from a decoded header list to a RequestHead, or the reason why it is malformed.

A malformed request is an error of its stream, never of the connection (8.1.1): other streams live on.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from evap.errors import EvapError, ExpectationFailed, InvalidRequest
from evap.protocol.events import RequestHead

Fields = list[tuple[bytes, bytes]]


class Malformed(Exception):
    """Answered with RST_STREAM PROTOCOL_ERROR. The text has none of the peer's bytes."""


class Head(NamedTuple):
    """head: what the exchange sees. length: content-length or None. refusal: a well-formed request that is answered at
    once with this error. wants_continue: it waits for 100 (RFC 9110 10.1.1). size: octets of names and values."""

    head: RequestHead
    length: int | None
    refusal: EvapError | None
    wants_continue: bool
    size: int


CONNECTION_FIELDS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
MAX_LENGTH_DIGITS: Final = 18

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_PATH = re.compile(rb"/[\x21\x22\x24-\x7e]*").fullmatch
_AUTHORITY = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=%:\[\]]+").fullmatch


#: Names that have passed, so that the usual ones cost a look-up.
_good_names: set[bytes] = set()
MEMO_NAMES: Final = 1024


def check_fields(fields: Fields) -> None:
    """Names and values of ordinary fields: RFC 9113 8.2.1 and 8.2.2. Raises Malformed."""
    for name, value in fields:
        if name not in _good_names:
            _check_name(name)
        if value != value.strip(b" \t"):
            raise Malformed("white space around a field value")
        if name == b"te" and value.lower() != b"trailers":
            raise Malformed("te may only be trailers")
    values = b"".join([value for _, value in fields])
    if len(values) != len(values.translate(None, b"\x00\r\n")):
        raise Malformed("control character in a field value")


def _check_name(name: bytes) -> None:
    if _NAME(name) is None or name in CONNECTION_FIELDS:
        raise Malformed("bad or connection-specific field name")
    if len(_good_names) >= MEMO_NAMES:
        _good_names.clear()
    _good_names.add(name)


def check_trailers(fields: Fields) -> None:
    """RFC 9113 8.1: no pseudo-header fields (a colon is no token character), same rules otherwise."""
    check_fields(fields)


def parse(fields: Fields, *, peer: str, ended: bool) -> Head:
    """`ended`: the head carried END_STREAM. Raises Malformed."""
    pseudo, rest = _split(fields)
    check_fields(rest)
    index = _index(rest)
    method, path = pseudo.get(b":method"), pseudo.get(b":path")
    if method is None or _METHOD(method) is None:
        raise Malformed("missing or bad :method")
    authority = _authority(pseudo, rest, index)
    length = _length(rest) if b"content-length" in index else None
    if ended and length:
        raise Malformed("content-length without a body")
    if method == b"CONNECT":  # neither a proxy (RFC 9110 9.3.6) nor RFC 8441, whose :protocol is unknown above
        raise Malformed("CONNECT is not supported")
    refusal: EvapError | None = None
    if path is None or (_PATH(path) is None and not (path == b"*" and method == b"OPTIONS")):
        raise Malformed("missing or bad :path")
    scheme = pseudo.get(b":scheme")
    if scheme is None:
        raise Malformed("missing :scheme")
    if scheme not in (b"http", b"https"):
        refusal = InvalidRequest("the scheme must be http or https", code="bad_scheme")
    expect = index.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        refusal = ExpectationFailed("this expectation is not supported")
    target, _, query = path.decode("ascii").partition("?")
    head = RequestHead(
        method=method.decode("ascii"),
        path=target,
        query=query,
        headers=rest,
        version="2",
        scheme=scheme.decode("latin-1"),
        authority=authority.decode("ascii"),
        peer=peer,
        index=index,
    )
    size = sum([len(name) + len(value) for name, value in fields])
    return Head(head, length, refusal, expect is not None and refusal is None and not ended, size)


def _split(fields: Fields) -> tuple[dict[bytes, bytes], Fields]:
    """Pseudo-header fields come first, once each, and only those of requests (RFC 9113 8.3)."""
    pseudo: dict[bytes, bytes] = {}
    for at, (name, value) in enumerate(fields):
        if name[:1] != b":":
            return pseudo, fields[at:]
        if name not in PSEUDO or name in pseudo:
            raise Malformed("unknown or repeated pseudo-header field")
        pseudo[name] = value
    return pseudo, []


def _index(fields: Fields) -> dict[bytes, bytes]:
    """First value per name; cookie crumbs are joined (RFC 9113 8.2.3)."""
    index: dict[bytes, bytes] = {}
    for name, value in reversed(fields):
        index[name] = value
    if b"cookie" in index:
        index[b"cookie"] = b"; ".join([value for name, value in fields if name == b"cookie"])
    return index


def _authority(pseudo: dict[bytes, bytes], fields: Fields, index: dict[bytes, bytes]) -> bytes:
    """RFC 9113 8.3.1: not empty, no userinfo, and host says the same (host is case-insensitive)."""
    authority, host = pseudo.get(b":authority"), index.get(b"host")
    if host is not None:
        if sum(1 for name, _ in fields if name == b"host") > 1:
            raise Malformed("more than one host")
        if authority is not None and authority != host and authority.lower() != host.lower():
            raise Malformed(":authority and host differ")
        authority = host if authority is None else authority
    if authority is None:
        return b""
    if _AUTHORITY(authority) is None:
        raise Malformed("bad authority")
    return authority


def _length(fields: Fields) -> int:
    """RFC 9110 8.6: digits only; the same value twice is taken once."""
    values = {value for name, value in fields if name == b"content-length"}
    value = values.pop()
    if values or not value.isdigit():
        raise Malformed("bad content-length")
    value = value.lstrip(b"0") or b"0"
    return int(value) if len(value) <= MAX_LENGTH_DIGITS else 10**MAX_LENGTH_DIGITS
