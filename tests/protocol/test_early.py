"""What is said of a request before its body is here."""

from __future__ import annotations

from evap.errors import EvapError, NotFound
from evap.protocol import headers as code
from evap.protocol.events import RequestHead
from tests.protocol import frames as f
from tests.protocol.joined import Raw

WRONG = [f.POST[0], *f.GET[1:]]
EXPECTS = (*f.POST, (b"expect", b"100-continue"))


def asking() -> tuple[Raw, list[RequestHead]]:
    """A connection whose owner refuses WRONG, and the heads that it was asked about."""
    raw, asked = Raw(), list[RequestHead]()

    def admit(head: RequestHead) -> EvapError | None:
        asked.append(head)
        return NotFound("no such route") if head.path == "/health" else None

    raw.shared.admit = admit
    return raw, asked


def test_a_request_can_be_refused_by_its_head() -> None:
    raw, asked = asking()
    raw.send(f.headers(1, WRONG), f.post(3))
    raw.wait(1)
    assert (raw.status(1), raw.resets(1)) == (404, [code.NO_ERROR])
    assert [request.head.path for request in raw.requests()] == ["/v1/chat/completions"]
    assert len(asked) == 1


def test_what_comes_whole_is_not_asked_about() -> None:
    raw, asked = asking()
    raw.send(f.post(1), f.get(3))
    assert len(raw.requests()) == 2
    assert asked == []


def test_what_waits_for_its_body_is_asked_about_once_and_handed_over_with_the_same_head() -> None:
    raw, asked = asking()
    raw.send(f.headers(1))
    raw.send(f.data(1, b"{"))
    raw.send(f.data(1, b"}", end=True))
    assert len(asked) == 1
    assert raw.requests()[0].head.known is asked[0].known
    raw.send(f.headers(3), f.priority_update(3, b"u=1"), f.data(3, b"{}", end=True))
    assert raw.requests()[1].head.known is asked[0].known, "a block that comes again, with another priority"


def test_what_was_reset_or_answered_in_the_same_read_is_not_asked_about() -> None:
    raw, asked = asking()
    raw.send(f.headers(1), f.rst(1), f.headers(3, (*f.POST, (b"content-length", b"999999999"))))
    assert asked == []
    assert raw.status(3) == 413


def test_100_continue_is_for_a_body_that_is_wanted_and_has_not_begun() -> None:
    raw, asked = asking()
    raw.send(f.headers(1, EXPECTS))
    raw.send(f.headers(3, (*WRONG, EXPECTS[-1])))
    raw.send(f.headers(5, EXPECTS), f.data(5, b"{"))
    raw.send(f.headers(7, EXPECTS), f.data(7, b"{}", end=True))
    assert (raw.status(1), raw.status(3)) == (100, 404)
    assert [o.sid for o in raw.out if o.type == f.HEADERS] == [1, 3]
    assert len(asked) == 3


def test_a_connection_that_ends_asks_nothing() -> None:
    raw, asked = asking()
    raw.send(f.headers(1), f.data(99, b"x"))
    assert raw.goaway == code.PROTOCOL_ERROR
    assert asked == []
