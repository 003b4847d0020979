"""What is said of an HTTP/1.1 request before its body is here."""

from __future__ import annotations

from evap.errors import EvapError, Unauthenticated
from evap.protocol.events import RequestHead
from evap.protocol.http1_reader import EARLY_BYTES
from tests.protocol.http1_wire import GET, JSON, Wire, post, read

EXPECTS = b"Expect: 100-continue"
WRONG = b"Authorization: Bearer wrong"


def asking() -> tuple[Wire, list[RequestHead]]:
    """A connection, and the heads that were asked about."""
    wire, asked = Wire(), list[RequestHead]()

    def admit(head: RequestHead) -> EvapError | None:
        asked.append(head)
        return Unauthenticated("no") if head.get(b"authorization") is not None else None

    wire.shared.admit = admit
    return wire, asked


def test_100_continue_is_for_a_body_that_is_wanted() -> None:
    wire, asked = asking()
    whole = post(b"abc", EXPECTS)
    wire.receive(whole[:-3])
    assert wire.flush() == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.receive(whole[-3:])
    wire.reply().whole(200, JSON, b"{}")
    wire.flush()
    wire.receive(post(b"abc", EXPECTS, WRONG)[:-3])
    status, fields, _ = read(wire.flush())
    assert (status, fields["connection"], wire.core.closing) == (401, "close", True)
    assert (len(asked), len(wire.requests), wire.shared.body_bytes) == (2, 1, 0)
    assert wire.shared.counts["violations"] == 0


def test_a_long_body_is_not_taken_from_who_may_not_send_it() -> None:
    for fields, body in (((), bytes(EARLY_BYTES + 1)), ((b"Transfer-Encoding: chunked",), b"")):
        wire, asked = asking()
        head = post(body, WRONG, *fields)[: -len(body) or None]
        if fields:
            head = head.replace(b"Content-Length: 0\r\n", b"")
        wire.receive(head)
        assert read(wire.flush())[0] == 401
        wire.receive(body)
        assert (len(asked), len(wire.requests), wire.shared.body_bytes) == (1, 0, 0)


def test_what_is_whole_or_short_is_judged_with_its_body() -> None:
    wire, asked = asking()
    whole = post(b"abc", WRONG)
    for data in (whole, GET, whole[:-3], b"a", b"bc", post(bytes(EARLY_BYTES + 1), WRONG), post(b"abc", EXPECTS)):
        wire.receive(data)
        if wire.core._reply is not None:
            wire.reply().whole(200, JSON, b"{}")
            assert read(wire.flush())[1].get("connection") != "close"
    assert (len(asked), len(wire.requests)) == (0, 5)


def test_it_is_asked_once_while_the_body_comes() -> None:
    wire, asked = asking()
    whole = post(bytes(2 * EARLY_BYTES))
    for start in range(0, len(whole), 10_000):
        wire.receive(whole[start : start + 10_000])
    assert (len(asked), len(wire.requests)) == (1, 1)
