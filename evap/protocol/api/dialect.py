"""What a dialect of the API must give: parse a body into a ParsedRequest, and render an answer piece by piece.

One renderer serves streamed and whole answers. Streamed, per choice: prelude, (delta | a row made of prefix + text +
tail)*, finish; then usage, done; or error and done. Whole: `whole`. A renderer is made per request and has no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from evap.errors import EvapError
from evap.messages import Choice, LogprobText, ParsedRequest, Usage


class Renderer(Protocol):
    #: "sse" | "text" (raw UTF-8) | "tokens" (u32 ids)
    kind: str
    #: content-type of the streamed and of the whole answer
    stream_type: bytes
    whole_type: bytes
    #: the response's id ("chatcmpl-..."), also for GET /v1/usage/{id}
    id: str

    def prelude(self, index: int, usage: Usage | None = None) -> bytes:
        """A choice's event before its first token (the assistant's role); may be empty. `usage` as in delta."""
        ...

    def row(self, index: int) -> tuple[bytes, bytes] | None:
        """(prefix, tail) of a text event: prefix + escaped text + '"' + spaces + tail is one whole event.
        None: this stream cannot take rows (logprobs, another dialect)."""
        ...

    def delta(
        self, index: int, text: str, logprobs: Sequence[LogprobText] | None = None, usage: Usage | None = None
    ) -> bytes:
        """One text event; `usage` is set when the client asked for stream_options.continuous_usage_stats."""
        ...

    def tokens(self, ids: Sequence[int]) -> bytes:
        """Little-endian u32 token ids, for kind "tokens"; b"" in the others."""
        ...

    def finish(
        self, index: int, reason: str, stop_reason: str | int | None = None, usage: Usage | None = None
    ) -> bytes:
        """The event with finish_reason; reason "stop" | "length" | "error". `usage` as in delta."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The final usage event (choices: []), asked for by stream_options.include_usage; else not called."""
        ...

    def error(self, error: EvapError) -> bytes:
        """The error as an event; b"" in kinds "text" and "tokens", which cannot say it: abort the reply instead."""
        ...

    def done(self) -> bytes:
        """`data: [DONE]`, or nothing in a dialect without it."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...


class Dialect(Protocol):
    def parse(self, body: bytes, *, max_choices: int) -> ParsedRequest:
        """Raises InvalidRequest (with param) for anything that is not a valid request."""
        ...

    def renderer(
        self, request: ParsedRequest, *, id_suffix: str, model: str, created_s: int, kind: str = "sse"
    ) -> Renderer:
        """`id_suffix`: 24 characters, unguessable, unique; `created_s`: Unix time; `kind`: what was negotiated."""
        ...
