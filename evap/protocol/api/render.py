"""The renderer of OpenAI's two event-stream dialects; they differ in a Shape, which is data and two functions.

An event is laid out so that everything before the text has the same length for every request of one served model:

    data: {"id":"chatcmpl-<24>","object":"..","model":"..","created":<10>,"choices":[{"index":   0,"delta":{"content":"
    <text>"<spaces>
    },"finish_reason":null}]}

The index is padded with spaces, which JSON allows before a number, and so are the spaces after the text's quote: a row
is this event with a text field of constant width (rows.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from evap.errors import EvapError, InvalidRequest, NotAcceptable
from evap.messages import Choice, LogprobText, ParsedRequest, Usage
from evap.protocol.api import sse
from evap.protocol.api.dialect import Renderer
from evap.protocol.api.plain import PlainRenderer
from evap.protocol.api.tokens import TOKENS_TYPE, TokensRenderer

_NO_USAGE: Final = b',"usage":null'
_END: Final = b"}\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a dialect's chunks and answers differ from the other's."""

    id_prefix: str
    chunk_object: str
    whole_object: str
    open: bytes  #: from the index to the text (its opening quote not included)
    close: bytes  #: from the text's closing quote to the next member of the choice
    plain: bytes  #: members of a text event after `close`, without logprobs
    prelude: bytes  #: members of a choice's first event; empty: there is none
    empty: bytes  #: members of the event with finish_reason
    #: (entries, alternatives asked for, text offset) -> the logprobs object
    logprobs: Callable[[Sequence[LogprobText], int, int], dict[str, Any]]
    #: (text, the logprobs object or None) -> members of a whole choice
    choice: Callable[[str, dict[str, Any] | None], dict[str, Any]]


class EventRenderer:
    """Server-sent events, or one JSON document."""

    kind = "sse"
    stream_type = sse.STREAM_TYPE
    whole_type = sse.JSON_TYPE
    __slots__ = ("_created", "_head", "_model", "_no_usage", "_offsets", "_request", "_shape", "id")

    def __init__(self, shape: Shape, request: ParsedRequest, id_suffix: str, model: str, created_s: int) -> None:
        self.id = shape.id_prefix + id_suffix
        self._shape = shape
        self._request = request
        self._model = model
        self._created = created_s
        constant = _constant(shape.chunk_object, model)
        self._head = b'data: {"id":"%b",%b%d,"choices":[' % (self.id.encode(), constant, created_s)
        # OpenAI: with include_usage, every chunk but the last has "usage": null
        self._no_usage = _NO_USAGE if request.include_usage else b""
        self._offsets: dict[int, int] = {}

    def prelude(self, index: int, usage: Usage | None = None) -> bytes:
        return self._event(index, self._shape.prelude, usage) if self._shape.prelude else b""

    def row(self, index: int) -> tuple[bytes, bytes] | None:
        request, shape = self._request, self._shape
        if request.sampling.logprobs is not None or request.continuous_usage:
            return None
        prefix = b'%b{"index":%4d,%b"' % (self._head, index, shape.open)
        return prefix, shape.close + shape.plain + b"}]" + self._no_usage + _END

    def delta(
        self, index: int, text: str, logprobs: Sequence[LogprobText] | None = None, usage: Usage | None = None
    ) -> bytes:
        shape = self._shape
        rest = shape.plain
        if logprobs:
            rest = b',"logprobs":%b,"finish_reason":null' % sse.encode(self._logprobs(index, logprobs))
        return self._event(index, shape.open + sse.encode(text) + shape.close + rest, usage)

    def tokens(self, ids: Sequence[int]) -> bytes:
        return b""

    def finish(
        self, index: int, reason: str, stop_reason: str | int | None = None, usage: Usage | None = None
    ) -> bytes:
        members = b'%b"finish_reason":"%b"' % (self._shape.empty, reason.encode())
        if stop_reason is not None:
            members += b',"stop_reason":' + sse.encode(stop_reason)
        return self._event(index, members, usage)

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + sse.usage_json(usage) + _END

    def error(self, error: EvapError) -> bytes:
        return sse.error_event(error)

    def done(self) -> bytes:
        return sse.DONE

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return sse.encode({
            "id": self.id, "object": self._shape.whole_object, "created": self._created, "model": self._model,
            "choices": [self._choice(c) for c in choices], "usage": msgspec.Raw(sse.usage_json(usage)),
        })  # fmt: skip

    def _event(self, index: int, members: bytes, usage: Usage | None) -> bytes:
        tail = self._no_usage if usage is None else b',"usage":' + sse.usage_json(usage)
        return b'%b{"index":%4d,%b}]%b}\n\n' % (self._head, index, members, tail)

    def _logprobs(self, index: int, entries: Sequence[LogprobText]) -> dict[str, Any]:
        offset = self._offsets.get(index)
        if offset is None:
            scored = "prompt_logprobs" in self._request.sampling.extra  # then the entries begin with the prompt's
            echoed = self._request.prompt_text if self._request.echo and not scored else None
            offset = len(echoed or "")
        self._offsets[index] = offset + sum(len(e.text) for e in entries)
        return self._shape.logprobs(entries, self._request.sampling.logprobs or 0, offset)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None if choice.logprobs is None else self._logprobs(choice.index, choice.logprobs)
        members = {"index": choice.index, **self._shape.choice(choice.text, logprobs)}
        members["finish_reason"] = choice.finish_reason
        if choice.stop_reason is not None:
            members["stop_reason"] = choice.stop_reason
        return members


def number(logprob: float) -> float:
    """JSON has no infinity: like OpenAI, -9999.0 stands for a token that was out of question (and for NaN)."""
    return logprob if logprob > -9999.0 else -9999.0


@functools.lru_cache(maxsize=64)
def _constant(chunk_object: str, model: str) -> bytes:
    return b'"object":"%b","model":%b,"created":' % (chunk_object.encode(), sse.encode(model))


def renderer_for(
    shape: Shape, request: ParsedRequest, *, id_suffix: str, model: str, created_s: int, kind: str
) -> Renderer:
    """The renderer of a negotiated kind. Raises InvalidRequest or NotAcceptable for what that kind cannot carry."""
    if kind == "sse":
        return EventRenderer(shape, request, id_suffix, model, created_s)
    if request.n > 1:
        raise InvalidRequest(f"n must be 1 for '{kind}' answers: nothing would tell the choices apart", param="n")
    if request.sampling.logprobs is not None:
        raise InvalidRequest(f"'{kind}' answers cannot carry logprobs", param="logprobs")
    if kind == "text":
        return PlainRenderer(shape.id_prefix + id_suffix)
    if not request.stream:
        raise NotAcceptable(f"{TOKENS_TYPE.decode()} is a stream: it needs stream: true")
    if request.stop or request.echo:
        param = "stop" if request.stop else "echo"
        raise InvalidRequest(f"{param} needs text: use stop_token_ids, or another Accept", param=param)
    return TokensRenderer(shape.id_prefix + id_suffix)
