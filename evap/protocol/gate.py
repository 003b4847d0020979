"""The frame gate in front of h2: raw bytes in, whole and plausible frames out (RFC 9113 section 4 and 6).

Rule: whatever can be refused from a frame's nine header bytes, or with a table, is refused here, before anything is
buffered or parsed. h2 sees one frame per call, so that an error in a later frame never swallows the events of an
earlier one. The gate keeps no stream state; it knows lengths, header blocks and SETTINGS entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from evap.config import ProtocolConfig
from evap.protocol import headers as code
from evap.protocol.limits import MAX_FRAME

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER: Final = Struct(">HBBBL")

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9
PRIORITY_UPDATE: Final = 0x10

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY_FLAG: Final = 0x20

#: SETTINGS ids that reach h2; others are dropped (RFC 9113 6.5.2: ignore what is unknown). h2 keeps every id it sees.
KNOWN_SETTINGS: Final = frozenset((1, 2, 3, 4, 5, 6))
HEADER_TABLE_SIZE: Final = 1
INITIAL_WINDOW_SIZE: Final = 4
ENABLE_CONNECT_PROTOCOL: Final = 8
NO_RFC7540_PRIORITIES: Final = 9
#: Our encoder never uses a dynamic table; this bounds what h2 keeps for it whatever the client allows.
ENCODER_TABLE_MAX: Final = 4096


class Violation(Exception):
    """A connection error (RFC 9113 5.4.1): the code for GOAWAY and a reason without any of the peer's bytes.

    limit: of limits.LIMITS, if it was one that was overrun."""

    def __init__(self, code: int, reason: str, limit: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.limit = limit


class Frame(NamedTuple):
    """One frame. `raw` is the whole of it with its nine header bytes; sid has the reserved bit cleared.

    For HEADERS, `raw` is the first frame and `block` the fragment joined over its CONTINUATIONs, without padding and
    priority; for other types `block` is empty.
    """

    type: int
    flags: int
    sid: int
    raw: bytes
    block: bytes = b""


class Form(NamedTuple):
    """What a frame type demands. length: exact payload length, or None. least: smallest. stream: None does not matter,
    True a stream id, False the connection."""

    length: int | None
    least: int
    stream: bool | None


FORMS: Final = {
    DATA: Form(None, 0, True),
    HEADERS: Form(None, 0, True),
    PRIORITY: Form(5, 0, True),
    RST_STREAM: Form(4, 0, True),
    SETTINGS: Form(None, 0, False),
    PUSH_PROMISE: Form(None, 4, True),
    PING: Form(8, 0, False),
    GOAWAY: Form(None, 8, False),
    WINDOW_UPDATE: Form(4, 0, None),
    CONTINUATION: Form(None, 0, True),
    PRIORITY_UPDATE: Form(None, 4, False),
}
ANY_FORM: Final = Form(None, 0, None)


class Gate:
    """Takes the preface off and splits the rest into frames."""

    __slots__ = ("_block_limit", "_continuations", "_data", "_first", "_fragments", "_head", "_pos", "_preface")

    def __init__(self, config: ProtocolConfig) -> None:
        #: A block is hardly ever longer than its list, which the decoder counts; up to twice the limit can be a
        #: mistake, and is answered with 431.
        self._block_limit = config.max_header_block_bytes or 2 * config.max_header_list_bytes
        self._continuations = config.max_continuations
        self._preface = PREFACE
        self._data = b""
        self._pos = 0
        self._first = True
        self._head: Frame | None = None
        self._fragments: list[bytes] = []

    @property
    def partial(self) -> bool:
        """A header block is open, or a frame other than DATA is incomplete (a slow body has a deadline of its own)."""
        if self._head is not None:
            return True
        rest = len(self._data) - self._pos
        return (rest > 3 and self._data[self._pos + 3] != DATA) or 0 < rest <= 3

    @property
    def held(self) -> int:
        """Octets that wait for more."""
        return len(self._data) - self._pos + sum(map(len, self._fragments))

    def feed(self, data: bytes) -> None:
        """Raises Violation for a wrong preface (RFC 9113 3.4)."""
        if self._preface:
            size = min(len(data), len(self._preface))
            if data[:size] != self._preface[:size]:
                raise Violation(code.PROTOCOL_ERROR, "not an HTTP/2 preface")
            self._preface = self._preface[size:]
            data = data[size:]
        rest = self._data[self._pos :] if self._pos < len(self._data) else b""
        self._data = rest + data if rest else data
        self._pos = 0

    def frames(self) -> Iterator[Frame]:
        """Whole frames, as far as the bytes reach. Raises Violation; nothing more comes after that."""
        data = self._data
        size = len(data)
        while size - self._pos >= 9:
            pos = self._pos
            high, low, kind, flags, sid = HEADER.unpack_from(data, pos)
            length = high << 8 | low
            sid &= 0x7FFFFFFF
            self._check(kind, flags, sid, length)
            end = pos + 9 + length
            if end > size:
                break
            raw = data[pos:end]
            self._pos = end
            if kind in (HEADERS, CONTINUATION):
                complete = self._header_block(kind, flags, sid, raw)
                if complete is not None:
                    yield complete
            else:
                yield Frame(kind, flags, sid, raw)
        if self._pos >= size:
            self._data = b""
            self._pos = 0

    def _check(self, kind: int, flags: int, sid: int, length: int) -> None:
        """From the header alone, before the payload is here."""
        if length > MAX_FRAME:
            raise Violation(code.FRAME_SIZE_ERROR, "frame longer than SETTINGS_MAX_FRAME_SIZE")
        head = self._head
        if head is not None:
            if kind != CONTINUATION or sid != head.sid:
                raise Violation(code.PROTOCOL_ERROR, "only CONTINUATION may follow inside a header block")
        elif kind == CONTINUATION:
            raise Violation(code.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        if self._first:
            if kind != SETTINGS or flags & ACK:
                raise Violation(code.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self._first = False
        form = FORMS.get(kind, ANY_FORM)
        if form.stream is not None and form.stream != (sid != 0):
            raise Violation(code.PROTOCOL_ERROR, "frame type on the wrong kind of stream")
        if (form.length is not None and length != form.length) or length < form.least:
            raise Violation(code.FRAME_SIZE_ERROR, "frame of the wrong length")
        if kind == SETTINGS and (length % 6 or (flags & ACK and length)):
            raise Violation(code.FRAME_SIZE_ERROR, "SETTINGS of the wrong length")

    def _header_block(self, kind: int, flags: int, sid: int, raw: bytes) -> Frame | None:
        """The frame whose block is complete now, or None."""
        if kind == HEADERS:
            fragment = strip_padding(raw, flags)
            if flags & PRIORITY_FLAG:
                if len(fragment) < 5:
                    raise Violation(code.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
                fragment = fragment[5:]
            head = Frame(HEADERS, flags, sid, raw, fragment)
            if flags & END_HEADERS:
                return head
            self._head = head
            self._fragments = [fragment]
            return None
        started = self._head
        assert started is not None
        self._fragments.append(raw[9:])
        if len(self._fragments) > self._continuations + 1 or sum(map(len, self._fragments)) > self._block_limit:
            raise Violation(code.ENHANCE_YOUR_CALM, "header block too long", "header_block")
        if not flags & END_HEADERS:
            return None
        self._head = None
        block = b"".join(self._fragments)
        self._fragments = []
        return started._replace(block=block, flags=started.flags | END_HEADERS)


def strip_padding(raw: bytes, flags: int) -> bytes:
    """Payload of a DATA or HEADERS frame without its padding (RFC 9113 6.1, 6.2)."""
    if not flags & PADDED:
        return raw[9:]
    if len(raw) < 10:
        raise Violation(code.FRAME_SIZE_ERROR, "padded frame without pad length")
    pad = raw[9]
    if pad >= len(raw) - 9:
        raise Violation(code.PROTOCOL_ERROR, "padding longer than the frame")
    return raw[10 : len(raw) - pad]


class SettingsFilter:
    """What of the peer's SETTINGS h2 may see. Remembers only the one setting that must not change (RFC 9218 2.1)."""

    __slots__ = ("_most", "_no_priorities", "_seen")

    def __init__(self, most: int) -> None:
        self._most = most  # entries in a frame; the registry has fewer than 20
        self._seen = False
        self._no_priorities: int | None = None

    def __call__(self, raw: bytes) -> tuple[bytes, dict[int, int]]:
        """(the frame for h2, what is in it). Raises Violation for what h2 does not check."""
        count = (len(raw) - 9) // 6
        if count > self._most:
            raise Violation(code.ENHANCE_YOUR_CALM, "too many settings in one frame", "settings")
        entries: dict[int, int] = {}
        for at in range(9, len(raw), 6):
            ident = int.from_bytes(raw[at : at + 2])
            value = int.from_bytes(raw[at + 2 : at + 6])
            if ident in KNOWN_SETTINGS:
                entries[ident] = value
            elif ident in (ENABLE_CONNECT_PROTOCOL, NO_RFC7540_PRIORITIES) and value > 1:
                raise Violation(code.PROTOCOL_ERROR, "setting out of range")
            elif ident == NO_RFC7540_PRIORITIES:
                if self._seen and value != (self._no_priorities or 0):
                    raise Violation(code.PROTOCOL_ERROR, "SETTINGS_NO_RFC7540_PRIORITIES changed")
                self._no_priorities = value
        self._seen = True
        if HEADER_TABLE_SIZE in entries:
            entries[HEADER_TABLE_SIZE] = min(entries[HEADER_TABLE_SIZE], ENCODER_TABLE_MAX)
        body = b"".join(ident.to_bytes(2) + value.to_bytes(4) for ident, value in entries.items())
        return HEADER.pack(0, len(body), SETTINGS, 0, 0) + body, entries
