from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from evap.errors import ContextOverflow, InvalidRequest
from evap.messages import Usage
from evap.protocol.api.sse import encode, error_event, usage_json

COUNTS = st.integers(0, 2**31)


@given(st.text())
def test_text_is_escaped_onto_one_line(text: str) -> None:
    data = encode(text)
    assert json.loads(data) == text
    assert not set(data) & set(b"\r\n\0")


@given(COUNTS, COUNTS, COUNTS)
def test_usage(prompt: int, cached: int, emitted: int) -> None:
    usage = Usage(prompt=prompt, cached=cached, computed=emitted + 1, emitted=emitted, delivered=0)
    assert json.loads(usage_json(usage)) == {
        "prompt_tokens": prompt, "completion_tokens": emitted, "total_tokens": prompt + emitted,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def test_errors_have_openais_shape() -> None:
    assert json.loads(error_event(InvalidRequest("no", param="a[0]"))[6:]) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "a[0]", "code": None}
    }
    assert json.loads(error_event(ContextOverflow("no"))[6:])["error"]["code"] == "context_length_exceeded"
