"""`POST /v1/completions`: OpenAI's older dialect, for raw prompts and for prompts that are token ids already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from evap.errors import InvalidRequest
from evap.messages import UNPREDICTED, LogprobText, ParsedRequest
from evap.protocol.api import fields, render
from evap.protocol.api.body import decode, decode_field, unsupported
from evap.protocol.api.dialect import Renderer

#: OpenAI's default, which differs from chat's
DEFAULT_MAX_TOKENS: Final = 16
#: the longest context that can be configured
MAX_PROMPT_IDS: Final = 10_000_000


class CompletionBody(fields.CommonFields, kw_only=True):
    prompt: msgspec.Raw  # a string, ids, or a list of one of those: decoded by its first characters
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: None = None


_BODY: Final = msgspec.json.Decoder(CompletionBody)
_Ids = Annotated[list[fields.Id], Meta(min_length=1)]
_TEXT: Final = msgspec.json.Decoder(str)
_IDS: Final = msgspec.json.Decoder(_Ids)
#: Tuples of one: decoding ends at the second element, however many there are.
_ONE_TEXT: Final = msgspec.json.Decoder(tuple[str])
_ONE_IDS: Final = msgspec.json.Decoder(tuple[_Ids])


class Completions:
    """The completions dialect. `structured_output`: the engine has vLLM's own fields, and grammars."""

    def __init__(self, *, structured_output: bool = False) -> None:
        self._structured_output = structured_output

    def parse(self, body: bytes, *, max_choices: int = 128) -> ParsedRequest:
        """Raises InvalidRequest (with param) for anything that is not a valid request."""
        request = decode(body, _BODY)
        fields.check_common(request, max_choices)
        text, ids = _prompt(request.prompt)
        _check(request, text, scores=self._structured_output)
        extra = fields.extras(request, supported=self._structured_output)
        if request.echo and request.logprobs is not None:
            extra["prompt_logprobs"] = request.logprobs
        include_usage, continuous_usage = fields.usage_options(request)
        return ParsedRequest(
            model=request.model,
            prompt_text=text,
            prompt_ids=ids,
            prompt_field="prompt",
            sampling=fields.sampling(request, request.logprobs, extra),
            left_open=fields.left_open(request),
            max_tokens=request.max_tokens if request.max_tokens is not None else DEFAULT_MAX_TOKENS,
            n=request.n or 1,
            priority=request.priority,
            stop=fields.stops(request.stop),
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            stream=bool(request.stream),
            include_usage=include_usage,
            continuous_usage=continuous_usage,
            echo=bool(request.echo),
            user=request.user,
        )

    def renderer(
        self, request: ParsedRequest, *, id_suffix: str, model: str, created_s: int, kind: str = "sse"
    ) -> Renderer:
        """Raises InvalidRequest or NotAcceptable if the answer cannot be of that kind."""
        return render.renderer_for(
            SHAPE, request, id_suffix=id_suffix, model=model, created_s=created_s, kind=kind
        )  # fmt: skip


def _check(request: CompletionBody, text: str | None, *, scores: bool) -> None:
    """`scores`: the engine has log probabilities of the prompt."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of")
    if request.echo and text is None:
        raise InvalidRequest("echo needs a prompt that is text", param="echo")
    if request.echo and request.logprobs is not None and not scores:
        raise InvalidRequest("echo with logprobs is not supported: no logprobs of the prompt are kept", param="echo")


def _prompt(raw: msgspec.Raw) -> tuple[str | None, list[int] | None]:
    """(text, None) or (None, ids)."""
    data = bytes(raw)
    start = data[:64].translate(None, b" \t\r\n")[:2]
    if start[:1] == b'"':
        return decode_field(raw, _TEXT, "prompt"), None
    if start == b'["':
        return _one(raw, _ONE_TEXT), None
    if data.count(b",") >= MAX_PROMPT_IDS:
        raise InvalidRequest(f"prompt has more than {MAX_PROMPT_IDS} token ids", param="prompt")
    if start == b"[[":
        return None, _one(raw, _ONE_IDS)
    if start[:1] == b"[":
        return None, decode_field(raw, _IDS, "prompt")
    raise InvalidRequest("prompt must be a string or a list of token ids", param="prompt", code="invalid_type")


def _one(raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decode_field(raw, decoder, "prompt")[0]
    except InvalidRequest as error:
        if error.param == "prompt":  # not something inside it: there are more of them
            message = "one prompt per request: send several prompts as several requests"
            raise InvalidRequest(message, param="prompt") from None
        raise


# Rendering


def _logprobs(entries: Sequence[LogprobText], k: int, offset: int) -> dict[str, Any]:
    """OpenAI's older shape: parallel lists. The alternatives always have the sampled token among them."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if e.logprob == UNPREDICTED else render.number(e.logprob) for e in entries],
        "tokens": [e.text for e in entries],
        "top_logprobs": [None if e.logprob == UNPREDICTED else _alternatives(e, k) for e in entries],
    }


def _alternatives(entry: LogprobText, k: int) -> dict[str, float]:
    return {entry.text: render.number(entry.logprob), **{text: render.number(lp) for text, lp, _ in entry.top[:k]}}


def _choice(text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"text": text, "logprobs": logprobs}


SHAPE: Final = render.Shape(
    id_prefix="cmpl-",
    chunk_object="text_completion",
    whole_object="text_completion",
    open=b'"text":',
    close=b"",
    plain=b',"logprobs":null,"finish_reason":null',
    prelude=b"",
    empty=b'"text":"","logprobs":null,',
    logprobs=_logprobs,
    choice=_choice,
)
