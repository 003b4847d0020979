"""What the server and the intake process say to each other: one msgpack message a packet (SOCK_SEQPACKET).

Bodies and results do not travel here, but in the body's own memory file (protocol/spool.py), whose descriptor comes
with `Parse` and which belongs to one end at a time:

    Parse   ->               the body; read, then the file is emptied
            <- Parsed        `size` bytes: the ParsedRequest without what its prompt is made of, msgpack
    Encode  ->               the request has been admitted: tokenize it
            <- Encoded       `count` token ids, C ints, and `text` bytes of UTF-8 after them (only for an echo)

Refused instead of Parsed or Encoded: the request's fault. Failed: ours. Cancel is never answered.
"""

from __future__ import annotations

import msgspec

from evap import errors
from evap.messages import ParsedRequest

MAX_PACKET: int = 64 << 10
#: of a traceback
MAX_TRACE_CHARS: int = 8000


class Boot(msgspec.Struct, frozen=True, tag="boot", array_like=True):
    """path: the model's directory, "" for the synthetic engine's text."""

    path: str
    token_cache_mb: int
    max_choices: int
    structured_output: bool


class Parse(msgspec.Struct, frozen=True, tag="parse", array_like=True):
    job: int
    dialect: str


class Encode(msgspec.Struct, frozen=True, tag="encode", array_like=True):
    job: int
    limit_tokens: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    job: int


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    pass


class Parsed(msgspec.Struct, frozen=True, tag="parsed", array_like=True):
    job: int
    size: int


class Encoded(msgspec.Struct, frozen=True, tag="encoded", array_like=True):
    """low, high: the least and the greatest of the ids."""

    job: int
    count: int
    low: int
    high: int
    text: int


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    job: int
    kind: str  # a class of errors.py
    message: str
    param: str | None
    code: str | None


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    job: int
    trace: str


ToWorker = Boot | Parse | Encode | Cancel
FromWorker = Ready | Parsed | Encoded | Refused | Failed

encode = msgspec.msgpack.Encoder().encode
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)
request = msgspec.msgpack.Decoder(ParsedRequest)


def bare(parsed: ParsedRequest) -> bytes:
    """A request without what only the tokenizer needs."""
    return encode(
        msgspec.structs.replace(parsed, messages=None, prompt_text=None, prompt_ids=None, template_args={})
    )  # fmt: skip


def refused(job: int, error: errors.EvapError) -> Refused:
    return Refused(job, type(error).__name__, error.message, error.param, error.code)


def error(message: Refused) -> errors.EvapError:
    """The error as it was raised: what can be raised there takes a message, a param and a code."""
    kind: type[errors.EvapError] = getattr(errors, message.kind)
    return kind(message.message, param=message.param, code=message.code)
