"""Invariant: any body is a ParsedRequest or an InvalidRequest, whose message has at most 1 KiB and repeats at most 64
bytes of the body. Nothing else is ever raised, for either dialect.

Run: `python -m fuzz.chat_json --seconds 60`.
"""

from __future__ import annotations

from evap.errors import MAX_ECHO_BYTES, MAX_MESSAGE_BYTES, InvalidRequest
from evap.messages import ParsedRequest
from evap.protocol.api.dialect import Dialect
from evap.protocol.api.router import dialects
from fuzz.runner import main

DIALECTS = tuple(dialects().values())


def refusal(dialect: Dialect, data: bytes) -> InvalidRequest | None:
    try:
        request = dialect.parse(data, max_choices=128)
    except InvalidRequest as error:
        return error
    assert isinstance(request, ParsedRequest)
    assert [request.messages, request.prompt_text, request.prompt_ids].count(None) == 2
    return None


def one_input(data: bytes) -> None:
    for dialect in DIALECTS:
        error = refusal(dialect, data)
        if error is None:
            continue
        message = error.message.encode()
        assert len(message) <= MAX_MESSAGE_BYTES
        assert len((error.param or "").encode()) <= 2 * MAX_ECHO_BYTES
        size = MAX_ECHO_BYTES + 3  # our quotation marks may be in the input too
        for i in range(len(message) - size + 1):
            assert message[i : i + size] not in data, "the message repeats the input"


if __name__ == "__main__":
    main(one_input, "chat_json")
