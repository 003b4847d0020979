"""W3C Trace Context (Recommendation, level 1 and 2): whose part a request is of a distributed trace.

`traceparent` and `tracestate` are fields of requests; nothing is said of responses, so none are sent. What is malformed
is ignored, as if it had not come, and nobody is told (section 3.2.2.5): tracing must not break what it looks at.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from evap.protocol.events import RequestHead

SAMPLED: Final = 0x01
RANDOM: Final = 0x02
#: Octets of a tracestate that are kept; a longer one is dropped (section 3.3.1.5 asks for at least 512).
MAX_STATE: Final = 4096
MAX_MEMBERS: Final = 32

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?").fullmatch
#: Level 2, section 3.3.1.3: a key may begin with a digit, and a tenant is no longer told apart.
_KEY = re.compile(rb"[a-z0-9][a-z0-9_\-*/@]{0,255}").fullmatch
_VALUE = re.compile(rb"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]").fullmatch


class TraceContext(NamedTuple):
    """Ids are lower-case hexadecimal. parent_id: "" where the trace begins here. span_id: ours. state: in order."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    flags: int = SAMPLED
    state: tuple[tuple[str, str], ...] = ()

    @property
    def traceparent(self) -> str:
        """What an answer may tell of it, and what would be sent on."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def read(head: RequestHead) -> TraceContext | None:
    """The context of a request, with a span id of ours; None without a valid traceparent."""
    values = [value for name, value in head.headers if name == b"traceparent"]
    if len(values) != 1:
        return None
    match = _PARENT(values[0])
    if match is None:
        return None
    version, trace_id, parent_id, flags = (part.decode() for part in match.groups())
    if version == "ff" or (version == "00" and len(values[0]) != 55):  # others may be longer (section 4)
        return None
    if not int(trace_id, 16) or not int(parent_id, 16):
        return None
    state = b",".join([value for name, value in head.headers if name == b"tracestate"])
    known = int(flags, 16) & (SAMPLED | RANDOM)
    return TraceContext(trace_id, os.urandom(8).hex(), parent_id, known, _state(state))


def of(head: RequestHead, wanted: object, share: float = 1.0) -> TraceContext | None:
    """The trace that the client began, or one that begins here if one is `wanted`."""
    found = read(head) if b"traceparent" in head.index else None
    return found if found is not None or not wanted else begin(share)


def begin(share: float = 1.0) -> TraceContext:
    """A trace that begins here; its id is random (level 2, section 3.2.2.3.2). share: of traces that are sampled."""
    data = os.urandom(24)
    sampled = SAMPLED if int.from_bytes(data[8:16], "big") < share * (1 << 64) else 0
    text = data.hex()
    return TraceContext(text[:32], text[32:], "", sampled | RANDOM)


def _state(value: bytes) -> tuple[tuple[str, str], ...]:
    """() for anything that is not a valid list (section 3.3.1): it is dropped as a whole."""
    if len(value) > MAX_STATE:
        return ()
    members: dict[str, str] = {}
    for member in map(bytes.strip, value.split(b",")):  # no other white space than OWS can be in a field value
        if not member:  # empty members are allowed
            continue
        key, equals, entry = member.partition(b"=")
        name = key.decode("latin-1")
        if not equals or _KEY(key) is None or _VALUE(entry) is None or name in members:
            return ()
        members[name] = entry.decode()
    return tuple(members.items()) if len(members) <= MAX_MEMBERS else ()
