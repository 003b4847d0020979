"""Content negotiation: what the body may be (RFC 9110 section 8.3) and what the answer shall be (section 12.5.1)."""

from __future__ import annotations

import re
from typing import Final

from evap.errors import NotAcceptable, UnsupportedMediaType, echo

#: Kind of answer -> the media types that ask for it, in order of preference on a tie. "sse" is the dialect's own form
#: (events when streamed, else one JSON document): SDKs ask for JSON and get a stream, so either type means it.
KINDS: Final = {
    "sse": ("text/event-stream", "application/json"),
    "text": ("text/plain",),
    "tokens": ("application/vnd.evap.tokens",),
}
#: ranges of one Accept that are looked at
MAX_RANGES: Final = 64
_COMMON: Final = frozenset((None, b"", b"*/*", b"application/json", b"text/event-stream"))
_QUALITY: Final = re.compile(r"0(?:\.\d{0,3})?|1(?:\.0{0,3})?")


def check_body(content_type: bytes | None, content_encoding: bytes | None) -> None:
    """The body must be JSON, not compressed. A missing content-type is taken for JSON. Raises UnsupportedMediaType."""
    if content_encoding is not None and content_encoding.strip().lower() not in (b"", b"identity"):
        name = echo(content_encoding.decode("latin-1"))
        raise UnsupportedMediaType(f"content-encoding '{name}' is not supported: send the body uncompressed")
    if content_type is None or content_type == b"application/json":
        return
    media, _, parameters = content_type.decode("latin-1").lower().partition(";")
    if media.strip() != "application/json":
        name = echo(media.strip())
        raise UnsupportedMediaType(
            f"content-type must be application/json, not '{name}' (curl: add -H 'content-type: application/json')"
        )
    for parameter in parameters.split(";")[:8]:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip(' \t"') not in ("utf-8", "utf8", "us-ascii"):
            raise UnsupportedMediaType("JSON is UTF-8: content-type may not name another charset")


def negotiate(accept: bytes | None, stream: bool = True) -> str:
    """The kind of answer that Accept asks for: "sse" | "text" | "tokens" (the last for streams only).

    The best quality wins, "sse" on a tie. Raises NotAcceptable if nothing that this API can give is accepted.
    """
    if accept in _COMMON:
        return "sse"
    ranges = _ranges(accept or b"")
    if not ranges:  # nothing but garbage: as if there were none
        return "sse"
    best, best_quality = "", 0.0
    for kind, types in KINDS.items():
        quality = max(_quality(ranges, t) for t in types)
        if quality > best_quality and (stream or kind != "tokens"):
            best, best_quality = kind, quality
    if not best:
        offered = ", ".join(t for types in KINDS.values() for t in types)
        raise NotAcceptable(f"none of the types in Accept can be given; there are {offered}")
    return best


def _ranges(accept: bytes) -> dict[str, float]:
    """Media range -> quality; what is not of that form is left out."""
    found = {}
    for item in accept.decode("latin-1").lower().split(",", MAX_RANGES)[:MAX_RANGES]:
        media, *parameters = (p.strip() for p in item.split(";"))
        quality = next((p[2:].strip() for p in parameters if p.startswith("q=")), "1")
        kind, slash, subtype = media.partition("/")
        if kind and slash and subtype and _QUALITY.fullmatch(quality):
            found[media] = float(quality)
    return found


def _quality(ranges: dict[str, float], media: str) -> float:
    """Of the ranges that match, the most specific one counts."""
    for candidate in (media, media.partition("/")[0] + "/*", "*/*"):
        if candidate in ranges:
            return ranges[candidate]
    return 0.0
