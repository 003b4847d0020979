"""Header rules shared by both HTTP versions, and the one total table from our errors to the wire.

The table: error class -> (status, HTTP/2 error code). The status answers a request that has no response yet; the HTTP/2
code (RFC 9113 section 7) breaks off a stream that has one. A test holds every class of `evap/errors.py` against it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from email.utils import formatdate
from typing import Final

import msgspec

from evap import errors as e
from evap.protocol.events import HeaderList, RequestHead

NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
INTERNAL_ERROR: Final = 0x2
FLOW_CONTROL_ERROR: Final = 0x3
SETTINGS_TIMEOUT: Final = 0x4
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB
INADEQUATE_SECURITY: Final = 0xC

ERRORS: Final[dict[type[e.EvapError], tuple[int, int]]] = {
    e.EvapError: (500, INTERNAL_ERROR),
    e.ClientError: (400, PROTOCOL_ERROR),
    e.InvalidRequest: (400, CANCEL),
    e.ContextOverflow: (400, CANCEL),
    e.Unauthenticated: (401, CANCEL),
    e.PermissionDenied: (403, CANCEL),
    e.NotFound: (404, CANCEL),
    e.MethodNotAllowed: (405, CANCEL),
    e.NotAcceptable: (406, CANCEL),
    e.RequestTimeout: (408, CANCEL),
    e.Conflict: (409, CANCEL),
    e.BodyTooLarge: (413, CANCEL),
    e.UnsupportedMediaType: (415, CANCEL),
    e.ExpectationFailed: (417, CANCEL),
    e.HeadersTooLarge: (431, ENHANCE_YOUR_CALM),
    e.RateLimited: (429, ENHANCE_YOUR_CALM),
    e.QuotaExceeded: (429, ENHANCE_YOUR_CALM),
    e.ServerError: (500, INTERNAL_ERROR),
    e.Overloaded: (503, REFUSED_STREAM),
    e.Draining: (503, REFUSED_STREAM),
    e.EngineUnavailable: (503, INTERNAL_ERROR),
    e.EngineFailed: (500, INTERNAL_ERROR),
    e.DeadlineExceeded: (504, CANCEL),
    e.InternalError: (500, INTERNAL_ERROR),
    e.StartupError: (500, INTERNAL_ERROR),
    e.OutdatedError: (500, INTERNAL_ERROR),
}

JSON: Final = b"application/json"
MAX_REQUEST_ID_BYTES: Final = 128


class BadHeader(ValueError):
    """One of *our* header fields cannot be sent: a bug here, never the peer's fault."""


def wire_code(error: e.EvapError) -> tuple[int, int]:
    """(status, HTTP/2 error code). A class that is not in the table (a subclass made elsewhere) takes its parent's."""
    for cls in type(error).__mro__:
        found = ERRORS.get(cls)
        if found is not None:
            return found
    return ERRORS[e.EvapError]


def error_body(error: e.EvapError) -> bytes:
    """The OpenAI shape: {"error": {"message", "type", "param", "code"}}; at most about 1.3 KiB."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_headers(error: e.EvapError) -> list[tuple[bytes, bytes]]:
    """content-type, and what the status demands: retry-after (RFC 9110 10.2.3), allow (15.5.6), www-authenticate
    (15.5.2). Neither content-length nor date."""
    headers = [(b"content-type", JSON)]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, int(error.retry_after_s + 0.999))))
    if isinstance(error, e.MethodNotAllowed):
        headers.append((b"allow", error.allow.encode("ascii", "replace")))
    if isinstance(error, e.Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if (isinstance(error, e.DeadlineExceeded) and error.code == error.default_code) or isinstance(error, e.Conflict):
        headers.append((b"x-should-retry", b"false"))  # OpenAI's SDKs would: not on time, or generated already
    if isinstance(error, e.RateLimited):
        headers += limit_headers(error.limits)
    return headers


def limit_headers(limits: Sequence[e.Limit]) -> list[tuple[bytes, bytes]]:
    """OpenAI's x-ratelimit-{limit,remaining,reset}-{requests,tokens}."""
    found = []
    for limit in limits:
        name = limit.name.encode()
        found.append((b"x-ratelimit-limit-" + name, b"%d" % limit.limit))
        found.append((b"x-ratelimit-remaining-" + name, b"%d" % limit.remaining))
        found.append((b"x-ratelimit-reset-" + name, _duration(limit.reset_s)))
    return found


def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return b"%dms" % (seconds * 1000 + 0.999)
    if seconds < 60:
        return b"%gs" % round(seconds, 3)
    return b"%dm%ds" % divmod(int(seconds + 0.999), 60)


def echoed(head: RequestHead) -> HeaderList:
    """The client's X-Request-Id, for the answer's head and nothing else: it is never used as a key, and stands in no
    event of a stream. Raises InvalidRequest for a long one."""
    request_id = head.get(b"x-request-id")
    if request_id is None:
        return ()
    if len(request_id) > MAX_REQUEST_ID_BYTES:
        raise e.InvalidRequest(f"X-Request-Id is longer than {MAX_REQUEST_ID_BYTES} bytes", param="x-request-id")
    return ((b"x-request-id", request_id),)


def echoed_if_valid(head: RequestHead | None) -> HeaderList:
    """The same for an error's head: a long one is left out."""
    value = head.get(b"x-request-id") if head is not None else None
    return ((b"x-request-id", value),) if value is not None and len(value) <= MAX_REQUEST_ID_BYTES else ()


_TOKEN_LOWER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_UNSENDABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]").search
#: RFC 9113 8.2.2: they would be connection-specific; the HTTP/1.1 core frames by itself as well.
FRAMING_FIELDS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b"te", b"trailer")
)


def vet_field(name: bytes, value: bytes) -> None:
    """Raise BadHeader unless the field of ours can be sent as it is: RFC 9110 5.5 and 5.6.2, RFC 9113 8.2.

    Names are lower-case tokens; values have no CTL (so no CR, LF, NUL) and no white space at the edges.
    """
    if type(name) is not bytes or type(value) is not bytes:
        raise BadHeader("header fields are bytes")
    if _TOKEN_LOWER(name) is None or name in FRAMING_FIELDS:
        raise BadHeader(f"bad header name {e.echo(name)}")
    if _UNSENDABLE(value) is not None or value != value.strip(b" \t"):
        raise BadHeader(f"bad value of header {e.echo(name)}")


def vet(headers: HeaderList) -> None:
    for name, value in headers:
        vet_field(name, value)


class DateCache:
    """The `date` field (RFC 9110 6.6.1), made anew once a second. The wall clock is passed in: seconds since 1970."""

    __slots__ = ("_second", "value")

    def __init__(self) -> None:
        self._second = -1
        self.value = b""

    def at(self, unix_s: int) -> bytes:
        if unix_s != self._second:
            self._second = unix_s
            self.value = formatdate(unix_s, usegmt=True).encode()
        return self.value
