"""Content negotiation, with the headers that real clients send."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.errors import NotAcceptable, UnsupportedMediaType
from evap.protocol.api.media import check_body, negotiate


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, "sse"),
        (b"", "sse"),
        (b"*/*", "sse"),  # curl, httpx, Go
        (b"application/json", "sse"),  # OpenAI's SDKs, also for streams
        (b"text/event-stream", "sse"),  # EventSource
        (b"application/json, text/plain, */*", "sse"),  # axios
        (b"text/event-stream, application/json;q=0.9", "sse"),
        (b"Application/JSON", "sse"),
        (b"application/*", "sse"),
        (b"text/*", "sse"),
        (b"text/plain", "text"),
        (b"text/plain; charset=utf-8", "text"),
        (b"text/plain, application/json;q=0.5", "text"),
        (b"text/plain;q=0.5, application/json;q=0.4, text/event-stream;q=0.1", "text"),
        (b"text/plain, */*;q=0.01", "text"),
        (b"text/plain;q=0, */*", "sse"),
        (b"application/json;q=0, text/event-stream;q=0, */*", "text"),
        (b"application/vnd.evap.tokens", "tokens"),
        (b"application/vnd.evap.tokens, text/plain;q=0.9", "tokens"),
        (b"application/vnd.evap.tokens;q=0.1, text/plain;q=0.9", "text"),
        (b"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "sse"),  # a browser
        (b"image/png, text/plain;q=0.001", "text"),
        (b"rubbish", "sse"),
        (b",;,q=1,", "sse"),
        (b"text/plain;q=nan, application/json;q=0.1", "sse"),
        (b"text/plain;q=9", "sse"),
    ],
)
def test_negotiate(accept: bytes | None, kind: str) -> None:
    assert negotiate(accept) == kind


def test_tokens_are_for_streams() -> None:
    assert negotiate(b"application/vnd.evap.tokens, application/json;q=0.1", stream=False) == "sse"
    with pytest.raises(NotAcceptable):
        negotiate(b"application/vnd.evap.tokens", stream=False)


@pytest.mark.parametrize("accept", [b"image/png", b"image/*;q=1", b"*/*;q=0", b"application/json;q=0", b"text/html"])
def test_nothing_fits(accept: bytes) -> None:
    with pytest.raises(NotAcceptable, match="text/event-stream, application/json, text/plain"):
        negotiate(accept)


@given(st.binary(max_size=100) | st.text("abt/*;q=0.1, plain", max_size=60).map(str.encode))
def test_any_header_gets_an_answer(accept: bytes) -> None:
    with contextlib.suppress(NotAcceptable):
        assert negotiate(accept) in ("sse", "text", "tokens")


def test_a_long_header_is_not_read_to_its_end() -> None:
    with pytest.raises(NotAcceptable):
        negotiate(b"image/png," * 64 + b"application/json")


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        (None, None),
        (b"application/json", None),
        (b"application/json; charset=utf-8", None),
        (b'Application/JSON ;charset="UTF-8"', b"identity"),
        (b"application/json;x=y;charset=us-ascii", b" Identity"),
        (b"application/json;", b""),
    ],
)
def test_bodies_that_are_taken(content_type: bytes | None, encoding: bytes | None) -> None:
    check_body(content_type, encoding)


@pytest.mark.parametrize(
    ("content_type", "encoding", "message"),
    [
        (b"application/x-www-form-urlencoded", None, "curl: add -H 'content-type: application/json'"),
        (b"", None, "not ''"),
        (b"text/json", None, "not 'text/json'"),
        (b"multipart/form-data; boundary=x", None, "not 'multipart/form-data'"),
        (b"application/json; charset=utf-16", None, "charset"),
        (b"application/json", b"gzip", "content-encoding 'gzip'"),
        (None, b"br", "uncompressed"),
        (b"\xff" * 5000, b"x" * 5000, "content-encoding"),
        (b"\xff" * 5000, None, "application/json"),
    ],
)
def test_bodies_that_are_not(content_type: bytes | None, encoding: bytes | None, message: str) -> None:
    with pytest.raises(UnsupportedMediaType) as caught:
        check_body(content_type, encoding)
    assert message in caught.value.message
    assert len(caught.value.message.encode()) < 250
