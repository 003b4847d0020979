"""RFC 9218: the `priority` header field and PRIORITY_UPDATE, a Dictionary of structured fields (RFC 8941)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

URGENCIES: Final = 8
#: RFC 9218 4.1: without a (valid) u.
DEFAULT_URGENCY: Final = 3
#: Longer values are not looked at: u and i need six octets.
MAX_VALUE: Final = 256

_KEY: Final = r"[a-z*][a-z0-9_\-.*]*"
_BARE: Final = (
    r'(?:-?[0-9]{1,12}\.[0-9]{1,3}|-?[0-9]{1,15}|"(?:[ !#-\[\]-~]|\\["\\])*"|[A-Za-z*][!#$%&\'*+\-.^_`|~0-9A-Za-z:/]*'
    r"|:[A-Za-z0-9+/=]*:|\?[01])"
)
_PARAMETERS: Final = rf"(?:; *{_KEY}(?:={_BARE})?)*"
_INNER: Final = rf"\( *(?:{_BARE}{_PARAMETERS}(?: +{_BARE}{_PARAMETERS})* *)?\)"
_MEMBER: Final = rf"(?P<key>{_KEY})(?:=(?P<value>{_BARE}|{_INNER}))?{_PARAMETERS}"
_member = re.compile(_MEMBER).match
_comma = re.compile(r"[ \t]*,[ \t]*").match


class Priority(NamedTuple):
    """urgency: 0 (soonest) to 7. incremental: parts of the answer are of use; here they are sent in turns anyway."""

    urgency: int = DEFAULT_URGENCY
    incremental: bool = False


DEFAULT: Final = Priority()


@lru_cache(maxsize=256)
def parse(value: bytes) -> Priority:
    """What a field value says. Never raises: what is malformed counts as absent, a parameter that is out of range or of
    another type by itself, anything that is no Dictionary as a whole (RFC 9218 4, RFC 8941 4.2)."""
    try:
        text = value.decode("ascii").strip(" ")
    except UnicodeDecodeError:
        return DEFAULT
    members = _dictionary(text) if len(value) <= MAX_VALUE else None
    if not members:
        return DEFAULT
    urgency, incremental = members.get("u"), members.get("i", "?0")
    return Priority(
        int(urgency) if urgency is not None and re.fullmatch("0*[0-7]", urgency) else DEFAULT_URGENCY,
        incremental in ("", "?1"),  # a key alone is true
    )


def _dictionary(text: str) -> dict[str, str] | None:
    """key -> value as it is written ("" for a key alone); the last one counts. None: malformed."""
    members: dict[str, str] = {}
    at = 0
    while at < len(text):
        found = _member(text, at)
        if found is None:
            return None
        members[found["key"]] = found["value"] or ""
        at = found.end()
        if at == len(text):
            break
        comma = _comma(text, at)
        if comma is None or comma.end() == len(text):
            return None
        at = comma.end()
    return members
