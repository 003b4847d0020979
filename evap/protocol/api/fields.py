"""Fields that chat and completions share, and how they become SamplingParams.

Rules:
1. null is the same as absent, for every optional field.
2. A field whose type here is `None` is known and refused: ignoring it would change the answer. Everything that is not
   declared is skipped (as vLLM does; OpenAI refuses it), see IGNORED.
3. Ranges stand in the types, so that they are checked while the body is parsed, and named in the error.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from evap.errors import InvalidRequest
from evap.messages import SamplingParams
from evap.protocol.api.body import ABSENT, decode_small, is_set, unsupported

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_STOP_IDS: Final = 128
MAX_BIASES: Final = 1024
MAX_USER_CHARS: Final = 512
MAX_SCHEMA_BYTES: Final = 256 << 10
MAX_BAD_WORDS: Final = 64
#: Accepted, and without effect here: they concern OpenAI's own service, or are hints that an engine may ignore.
IGNORED: Final = (
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "verbosity",
)  # fmt: skip

Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """Nothing here depends on the dialect; a struct of data, without behaviour."""

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: off
    min_p: Fraction | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # vLLM's
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    user: Annotated[str, Meta(max_length=MAX_USER_CHARS)] | None = None
    # Raw: lists that must be refused by their size before anything is made of them.
    stop: msgspec.Raw = ABSENT
    stop_token_ids: msgspec.Raw = ABSENT
    logit_bias: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT
    # vLLM's own: for an engine that has them, refused by others.
    structured_outputs: msgspec.Raw = ABSENT
    guided_json: msgspec.Raw = ABSENT
    guided_regex: msgspec.Raw = ABSENT
    guided_choice: msgspec.Raw = ABSENT
    guided_grammar: msgspec.Raw = ABSENT
    allowed_token_ids: msgspec.Raw = ABSENT
    bad_words: msgspec.Raw = ABSENT
    repetition_detection: msgspec.Raw = ABSENT
    # Refused (rule 2).
    logits_processors: None = None
    prompt_logprobs: None = None
    truncate_prompt_tokens: None = None
    prompt_embeds: None = None
    use_beam_search: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str


_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_STOP: Final = msgspec.json.Decoder(str | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)])
_STOP_IDS: Final = msgspec.json.Decoder(Annotated[list[Id], Meta(max_length=MAX_STOP_IDS)])
_BIAS: Final = msgspec.json.Decoder(
    Annotated[dict[Id, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)]
)
_FORMAT: Final = msgspec.json.Decoder(ResponseFormat)
_ANY: Final = msgspec.json.Decoder(dict[str, Any])
_CONSTRAINT: Final = msgspec.json.Decoder(dict[str, Any] | str | list[Any])
_IDS: Final = msgspec.json.Decoder(Annotated[list[Id], Meta(min_length=1, max_length=MAX_BIASES)])
_WORDS: Final = msgspec.json.Decoder(Annotated[list[str], Meta(min_length=1, max_length=MAX_BAD_WORDS)])
#: field -> how it is read, and the most bytes it may have; the engine checks the rest
EXTRAS: Final[dict[str, tuple[msgspec.json.Decoder[Any], int]]] = {
    "structured_outputs": (_ANY, MAX_SCHEMA_BYTES),
    "guided_json": (_CONSTRAINT, MAX_SCHEMA_BYTES),
    "guided_regex": (_CONSTRAINT, MAX_SCHEMA_BYTES),
    "guided_choice": (_CONSTRAINT, MAX_SCHEMA_BYTES),
    "guided_grammar": (_CONSTRAINT, MAX_SCHEMA_BYTES),
    "allowed_token_ids": (_IDS, MAX_BIASES * 16),
    "bad_words": (_WORDS, MAX_BAD_WORDS * (MAX_STOP_CHARS * 12 + 8)),
    "repetition_detection": (_ANY, 1024),
}


def stops(raw: msgspec.Raw) -> tuple[str, ...]:
    """Stop strings: one, or up to MAX_STOPS, of 1..MAX_STOP_CHARS characters each."""
    if not is_set(raw):
        return ()
    # 12 bytes are the longest way to write a character in JSON: two \\u escapes.
    value = decode_small(raw, _STOP, "stop", MAX_STOPS * (MAX_STOP_CHARS * 12 + 8))
    if isinstance(value, list):
        return tuple(value)
    if not 1 <= len(value) <= MAX_STOP_CHARS:
        raise InvalidRequest(f"stop must have 1 to {MAX_STOP_CHARS} characters", param="stop")
    return (value,)


def structured_output(raw: msgspec.Raw, *, supported: bool) -> dict[str, Any]:
    """What goes into SamplingParams.extra for `response_format`: nothing for plain text; for an engine that can hold
    a grammar (`supported`), {"response_format": the client's object}; else InvalidRequest."""
    if not is_set(raw):
        return {}
    kind = decode_small(raw, _FORMAT, "response_format", MAX_SCHEMA_BYTES).type
    if kind == "text":
        return {}
    if not supported or kind not in ("json_object", "json_schema"):
        raise InvalidRequest(
            "response_format other than {'type': 'text'} is not supported by this engine",
            param="response_format", code="unsupported_parameter",
        )  # fmt: skip
    return {"response_format": decode_small(raw, _ANY, "response_format", MAX_SCHEMA_BYTES)}


def extras(fields: CommonFields, *, supported: bool) -> dict[str, Any]:
    """What goes into SamplingParams.extra: `response_format` and vLLM's own fields, for an engine that has them."""
    found = structured_output(fields.response_format, supported=supported)
    for name, (decoder, most) in EXTRAS.items():
        raw = getattr(fields, name)
        if is_set(raw):
            if not supported:
                raise unsupported(name)
            found[name] = decode_small(raw, decoder, name, most)
    return found


def sampling(fields: CommonFields, logprobs: int | None, extra: dict[str, Any]) -> SamplingParams:
    """max_tokens stays 0 here: the exchange knows the context and completes it."""
    given = {name: value for name in _PLAIN if (value := getattr(fields, name)) is not None}
    if fields.top_k is not None and fields.top_k > 0:
        given["top_k"] = fields.top_k
    if is_set(fields.logit_bias):
        given["logit_bias"] = decode_small(fields.logit_bias, _BIAS, "logit_bias", MAX_BIASES * 48)
    if is_set(fields.stop_token_ids):
        ids = decode_small(fields.stop_token_ids, _STOP_IDS, "stop_token_ids", MAX_STOP_IDS * 16)
        given["stop_token_ids"] = tuple(ids)
    return SamplingParams(logprobs=logprobs, extra=extra, **given)


_PLAIN: Final = (
    "temperature", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "ignore_eos", "min_tokens",
)  # fmt: skip


#: What a model may have defaults of its own for.
_DEFAULTABLE: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def left_open(fields: CommonFields) -> tuple[str, ...]:
    """Fields of SamplingParams for which a model's own defaults hold, if it has any."""
    return tuple([name for name in _DEFAULTABLE if getattr(fields, name) is None])


def check_common(fields: CommonFields, max_choices: int) -> None:
    """What no single field's type can say."""
    if fields.n is not None and fields.n > max_choices:
        raise InvalidRequest(f"n is out of range: it must be at least 1 and at most {max_choices}", param="n")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if fields.use_beam_search:
        raise InvalidRequest(
            "use_beam_search is not supported by this engine", param="use_beam_search", code="unsupported_parameter"
        )


def usage_options(fields: CommonFields) -> tuple[bool, bool]:
    """(a final usage event, running usage in every event); the second only with the first, as in vLLM."""
    options = fields.stream_options
    if options is None or not options.include_usage:
        return False, False
    return True, bool(options.continuous_usage_stats)
