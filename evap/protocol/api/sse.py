"""What all dialects write the same way: usage, errors, the end of an event stream.

Nothing here escapes by hand: text goes through msgspec's encoder, which leaves no raw newline: an event is one line.
"""

from __future__ import annotations

from typing import Final

import msgspec

from evap.errors import EvapError
from evap.messages import Usage
from evap.protocol.headers import error_body

STREAM_TYPE: Final = b"text/event-stream; charset=utf-8"
JSON_TYPE: Final = b"application/json"
DONE: Final = b"data: [DONE]\n\n"

#: A Python value as JSON; a str becomes its quoted, escaped form.
encode = msgspec.json.Encoder().encode

_USAGE: Final = (
    b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
)


def usage_json(usage: Usage) -> bytes:
    """OpenAI's usage object. completion_tokens are the emitted ones: neither what a stop string threw away, nor only
    what the client has read."""
    return _USAGE % (usage.prompt, usage.emitted, usage.prompt + usage.emitted, usage.cached)


def error_event(error: EvapError) -> bytes:
    """An error inside a stream that has begun: the same object as in an answer."""
    return b"data: " + error_body(error) + b"\n\n"
