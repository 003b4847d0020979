"""Cases 9-20: streams."""

from __future__ import annotations

import tracemalloc

import pytest

from evap.protocol import headers as code
from tests.conformance.cases import case
from tests.protocol import frames as f
from tests.protocol.joined import Raw


@case(9, "RFC 9113 5.1.1")
@pytest.mark.parametrize("frame", [f.get(2), f.data(2, b"x"), f.rst(2), f.window(2, 1)])
def test_an_even_stream_from_a_client(frame: bytes) -> None:
    raw = Raw()
    raw.send(f.get(1), frame)
    assert raw.goaway == code.PROTOCOL_ERROR


@case(10, "RFC 9113 5.1.1")
def test_an_id_that_was_skipped_is_closed() -> None:
    raw = Raw()
    raw.send(f.get(5), f.get(3))
    assert raw.goaway in (code.PROTOCOL_ERROR, code.STREAM_CLOSED)


@case(11, "RFC 9113 5.1")
@pytest.mark.parametrize("frame", [f.data(7, b"x"), f.rst(7), f.window(7, 1)])
@pytest.mark.parametrize("before", [b"", f.get(1)])
def test_frames_on_an_idle_stream(frame: bytes, before: bytes) -> None:
    raw = Raw()
    raw.send(before, frame)
    assert raw.goaway == code.PROTOCOL_ERROR


@case(12, "RFC 9113 5.1", "CVE-2025-8671")
@pytest.mark.parametrize("late", [f.data(1, b"x"), f.data(1, b"", end=True), f.headers(1, end=True)])
def test_frames_after_end_stream_end_the_stream_only(late: bytes) -> None:
    raw = Raw()
    raw.send(f.get(1), f.get(3))
    raw.send(late)
    assert raw.resets(1) == [code.STREAM_CLOSED]
    assert raw.cancelled() == ["protocol_error"]
    assert raw.healthy
    assert len(raw.core.streams) == 1


@case(13, "RFC 9113 5.1", "RFC 9113 6.9.1")
def test_frames_on_a_stream_that_we_reset() -> None:
    raw = Raw(connection_window_bytes=65_535)
    raw.send(f.headers(1), f.headers(3))
    raw.core.streams[1].refuse()
    raw.flush()
    for _ in range(8):
        raw.send(f.data(1, bytes(16_000)))
    assert raw.resets() == [code.REFUSED_STREAM], "once is enough"
    raw.send(f.window(1, 1), f.rst(1), f.headers(1, end=True))
    assert raw.healthy
    credited = sum(o.number for o in raw.out if o.type == f.WINDOW_UPDATE and o.sid == 0)
    assert credited >= 8 * 16_000 - 65_535 // 2
    raw.send(f.data(3, b"{}", end=True))
    assert len(raw.requests()) == 1


@case(14, "RFC 9113 5.1.1")
def test_a_closed_id_cannot_be_used_again() -> None:
    raw = Raw()
    raw.send(f.get(1))
    raw.requests()[0].reply.whole(200, [], b"")
    raw.flush()
    raw.send(f.get(1))
    assert raw.goaway == code.STREAM_CLOSED


@case(15, "RFC 9113 5.1.2")
def test_more_streams_than_advertised_are_refused_one_by_one() -> None:
    raw = Raw(max_concurrent_streams=10)
    raw.send(*[f.get(sid) for sid in range(1, 101, 2)])
    assert len(raw.requests()) == 10
    assert raw.resets() == [code.REFUSED_STREAM] * 40
    assert raw.healthy
    raw.requests()[0].reply.whole(200, [], b"ok")
    raw.flush()
    raw.send(f.get(201))
    assert len(raw.requests()) == 11


@case(16, "CVE-2023-44487")
def test_rapid_reset_is_stopped() -> None:
    raw = Raw(reset_burst=100, reset_per_s=20.0)
    sent = 0
    for sid in range(1, 20_001, 2):
        raw.send(f.post(sid, b"{}"))
        raw.send(f.rst(sid))
        sent += 1
        if raw.core.closing:
            break
    assert raw.goaway == code.ENHANCE_YOUR_CALM
    assert sent == 101
    assert len(raw.requests()) <= 101
    assert not raw.core.streams


@case(16, "CVE-2023-44487")
def test_a_request_that_is_reset_in_the_same_read_is_never_handed_over() -> None:
    raw = Raw()
    raw.send(f.get(1), f.rst(1), f.get(3))
    assert [r.reply for r in raw.requests()] == [raw.core.streams[3]]
    assert raw.cancelled() == []


@case(16, "CVE-2023-44487")
def test_resets_of_users_who_press_stop_are_fine() -> None:
    raw = Raw(reset_burst=100, reset_per_s=20.0)
    for sid in range(1, 2001, 2):
        raw.send(f.get(sid), f.rst(sid))
        raw.wait(0.06)
    assert raw.healthy


@case(17, "CVE-2025-8671")
@pytest.mark.parametrize(
    "provoke",
    [
        lambda sid: f.get(sid) + f.data(sid, b"x"),
        lambda sid: f.headers(sid) + f.window(sid, (1 << 31) - 1),
        lambda sid: f.headers(sid, (*f.POST, (b"content-length", b"1"))) + f.data(sid, b"xx"),
        lambda sid: f.headers(sid, (*f.POST, (b"te", b"gzip"))),
    ],
    ids=["data after end", "window overflow", "content-length", "malformed"],
)
def test_resets_that_the_client_provokes_come_from_the_same_bucket(provoke: object) -> None:
    raw = Raw(reset_burst=100, reset_per_s=20.0)
    for sid in range(1, 2001, 2):
        raw.send(provoke(sid))  # type: ignore[operator]
        if raw.core.closing:
            break
    assert raw.goaway == code.ENHANCE_YOUR_CALM
    assert len(raw.resets()) in (100, 101)


@case(18, "RFC 9113 6.6", "RFC 9113 8.4")
def test_a_client_cannot_push() -> None:
    raw = Raw()
    raw.send(f.get(1), f.frame(f.PUSH_PROMISE, f.END_HEADERS, 1, (2).to_bytes(4) + f.block(f.GET)))
    assert raw.goaway == code.PROTOCOL_ERROR


@case(19, "RFC 9113 6.10")
@pytest.mark.parametrize(
    "bad",
    [
        f.frame(f.CONTINUATION, f.END_HEADERS, 1, b""),
        f.headers(1, flags=0) + f.frame(f.CONTINUATION, f.END_HEADERS, 3, b""),
        f.headers(1, flags=0) + f.headers(3),
        f.headers(1, flags=0) + f.rst(1),
    ],
    ids=["alone", "other stream", "HEADERS inside", "RST_STREAM inside"],
)
def test_continuation_out_of_place(bad: bytes) -> None:
    raw = Raw()
    raw.send(bad)
    assert raw.goaway == code.PROTOCOL_ERROR


@case(20, "RFC 9113 10.5", "CVE-2024-27316")
@pytest.mark.parametrize("size", [0, 1, 16_384])
def test_continuation_flood(size: int) -> None:
    raw = Raw()
    raw.send(f.headers(1, flags=0))
    one = f.frame(f.CONTINUATION, 0, 1, bytes(size))
    tracemalloc.start()
    sent = 0
    while not raw.core.closing and sent < 1000:
        raw.send(one)
        sent += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert raw.goaway == code.ENHANCE_YOUR_CALM
    assert sent <= 9
    assert peak < 256 << 10


@case(20, "RFC 9113 6.10")
def test_a_request_in_a_few_continuations_is_fine() -> None:
    raw = Raw()
    whole = f.block((*f.GET, (b"x-long", b"v" * 5000)))
    parts = [whole[at : at + 1000] for at in range(0, len(whole), 1000)]
    raw.send(f.frame(f.HEADERS, f.END_STREAM, 1, parts[0]))
    raw.send(*[f.frame(f.CONTINUATION, 0, 1, part) for part in parts[1:-1]])
    raw.send(f.frame(f.CONTINUATION, f.END_HEADERS, 1, parts[-1]))
    assert raw.requests()[0].head.get(b"x-long") == b"v" * 5000
