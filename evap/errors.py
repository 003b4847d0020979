"""The error tree, by whose fault. It names no wire code: `protocol/headers.py` maps every class to one.

EvapError
    ClientError             their fault: answered, before the engine sees anything
        InvalidRequest      a field is missing, of the wrong type, or out of range
            ContextOverflow prompt and max_tokens do not fit the context
        Unauthenticated
        PermissionDenied
        NotFound            no such route, model, or response
        MethodNotAllowed
        NotAcceptable
        RequestTimeout      the body did not arrive in time
        Conflict            an idempotency key is in use
        BodyTooLarge
        UnsupportedMediaType
        ExpectationFailed
        HeadersTooLarge
        RateLimited         a key's limit
            QuotaExceeded   a key's budget is used up
    ServerError             ours, or our state
        Overloaded          the queue is full
        Draining            going away; retry elsewhere
        EngineUnavailable   no replica is ready
        EngineFailed        the engine died or gave up under a running request
        DeadlineExceeded
        InternalError
    StartupError            the server cannot start: one line and a remedy, exit code 2
        OutdatedError       a process was started again from other code than the server's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

MAX_MESSAGE_BYTES: Final = 1024
MAX_ECHO_BYTES: Final = 64


def echo(value: object) -> str:
    """`value` as it may stand in a message: printable, at most 64 bytes of UTF-8."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() and not 0xD800 <= ord(c) <= 0xDFFF else "?" for c in text[:MAX_ECHO_BYTES])
    data = text.encode()
    return text if len(data) <= MAX_ECHO_BYTES else data[: MAX_ECHO_BYTES - 3].decode(errors="ignore") + "..."


class Limit(NamedTuple):
    """A rate of a key. name: "requests" | "tokens"; limit per minute; reset_s: until all of it is there again."""

    name: str
    limit: int
    remaining: int
    reset_s: float


class EvapError(Exception):
    """Base. `type`, `code` and `param` are OpenAI's; `retry_after_s` becomes Retry-After."""

    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        data = message.encode(errors="replace")
        self.message = message if len(data) <= MAX_MESSAGE_BYTES else data[:1000].decode(errors="ignore") + "..."
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


class ClientError(EvapError):
    type = "invalid_request_error"


class InvalidRequest(ClientError):
    pass


class ContextOverflow(InvalidRequest):
    default_code = "context_length_exceeded"


class Unauthenticated(ClientError):
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDenied(ClientError):
    type = "permission_error"


class NotFound(ClientError):
    default_code = "not_found"


class MethodNotAllowed(ClientError):
    default_code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class NotAcceptable(ClientError):
    default_code = "not_acceptable"


class RequestTimeout(ClientError):
    default_code = "request_timeout"


class Conflict(ClientError):
    default_code = "conflict"


class BodyTooLarge(ClientError):
    default_code = "body_too_large"


class UnsupportedMediaType(ClientError):
    default_code = "unsupported_media_type"


class ExpectationFailed(ClientError):
    default_code = "expectation_failed"


class HeadersTooLarge(ClientError):
    default_code = "headers_too_large"


class RateLimited(ClientError):
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    #: the rates and what is left of them, for the answer's headers
    limits: Sequence[Limit] = ()


class QuotaExceeded(RateLimited):
    type = "insufficient_quota"
    default_code = "insufficient_quota"


class ServerError(EvapError):
    pass


class Overloaded(ServerError):
    type = "overloaded_error"
    default_code = "overloaded"


class Draining(ServerError):
    type = "overloaded_error"
    default_code = "draining"


class EngineUnavailable(ServerError):
    default_code = "engine_unavailable"


class EngineFailed(ServerError):
    default_code = "engine_failed"


class DeadlineExceeded(ServerError):
    default_code = "deadline_exceeded"


class InternalError(ServerError):
    default_code = "internal_error"


class StartupError(EvapError):
    """`message` says what is wrong, `remedy` what to do; the command line prints both and exits with 2."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


#: What an engine's process says when its code is newer, or older, than that of the server which has started it.
OUTDATED: Final = "evap was replaced on disk while the server ran"
RESTART: Final = "restart the server"


class OutdatedError(StartupError):
    """A process that was started again has other code than the server, and they do not understand each other: trying
    again does not help. what: they disagree about."""

    def __init__(self, what: object) -> None:
        super().__init__(f"{OUTDATED} ({what})", remedy=RESTART)
