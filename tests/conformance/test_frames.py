"""Cases 1-8: preface and frames."""

from __future__ import annotations

import tracemalloc

import pytest

from evap.protocol import headers as code
from tests.conformance.cases import case
from tests.protocol import frames as f
from tests.protocol.joined import Raw


@case(1, "RFC 9113 3.4")
@pytest.mark.parametrize("wrong", [b"PRI * HTTP/2.1\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 24])
def test_a_wrong_preface_gets_goaway(wrong: bytes) -> None:
    raw = Raw(greet=False)
    raw.send(wrong + f.settings())
    assert raw.goaway == code.PROTOCOL_ERROR
    assert raw.core.closing


@case(2, "RFC 9113 3.4")
def test_a_preface_in_single_bytes_works() -> None:
    raw = Raw(greet=False)
    for octet in f.hello() + f.get(1):
        raw.send(bytes((octet,)))
    assert len(raw.requests()) == 1
    assert raw.healthy


@case(3, "RFC 9113 3.4")
@pytest.mark.parametrize("first", [f.ping(), f.get(1), f.settings_ack(), f.window(0, 1), f.frame(0xFF, 0, 0)])
def test_the_first_frame_must_be_settings(first: bytes) -> None:
    raw = Raw(greet=False)
    raw.send(f.PREFACE + first)
    assert raw.goaway == code.PROTOCOL_ERROR


@case(4, "RFC 9113 3.4", "RFC 9113 6.5")
@pytest.mark.parametrize("sent", [b"", f.PREFACE[:5], f.PREFACE, f.PREFACE + f.settings()[:6]])
def test_a_silent_client_is_closed(sent: bytes) -> None:
    raw = Raw(greet=False, preface_timeout_s=5.0)
    raw.send(sent)
    raw.wait(4.9)
    assert not raw.core.closing
    raw.wait(0.2)
    assert raw.core.closing


@case(5, "RFC 9113 4.2")
@pytest.mark.parametrize("kind", [f.DATA, f.HEADERS, f.SETTINGS, f.PING, 0xEE])
def test_an_announced_length_over_the_limit_is_refused_at_once(kind: int) -> None:
    raw = Raw()
    raw.send(f.frame(kind, 0, 1, b"", length=(1 << 14) + 1))
    assert raw.goaway == code.FRAME_SIZE_ERROR


@case(5, "RFC 9113 4.2")
def test_a_16_mib_frame_is_not_buffered() -> None:
    raw = Raw()
    chunk = bytes(1 << 20)
    tracemalloc.start()
    raw.send(f.headers(1), f.frame(f.DATA, 0, 1, b"", length=(1 << 24) - 1))
    for _ in range(15):
        raw.send(chunk)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert raw.goaway == code.FRAME_SIZE_ERROR
    assert held < 1 << 20


@case(6, "RFC 9113 5.5")
def test_unknown_frame_types_are_ignored_within_a_budget() -> None:
    raw = Raw(control_burst=20)
    raw.send(*[f.frame(kind, 0xFF, sid, b"whatever") for kind in (0xB, 0x21, 0xFF) for sid in (0, 1, 2)])
    raw.send(f.get(1))
    assert len(raw.requests()) == 1
    assert raw.healthy
    raw.send(f.frame(0xFF, 0, 0) * 40)
    assert raw.goaway == code.ENHANCE_YOUR_CALM


@case(6, "RFC 9113 6.10")
@pytest.mark.parametrize("between", [f.frame(0xFF, 0, 1), f.ping(), f.data(1), f.frame(f.PRIORITY, 0, 1, bytes(5))])
def test_nothing_may_come_inside_a_header_block(between: bytes) -> None:
    raw = Raw()
    raw.send(f.headers(1, flags=0), between)
    assert raw.goaway == code.PROTOCOL_ERROR


@case(7, "RFC 9113 4.1")
def test_reserved_bit_and_undefined_flags_are_ignored() -> None:
    raw = Raw()
    whole = bytearray(f.get(1))
    whole[4] |= 0x80 | 0x40 | 0x10 | 0x02
    whole[5] |= 0x80
    raw.send(bytes(whole), f.ping(flags=0xF0))
    assert len(raw.requests()) == 1
    assert [o.flags for o in raw.out if o.type == f.PING] == [f.ACK]
    assert raw.healthy


@case(8, "RFC 9113 6.1", "RFC 9113 6.2")
@pytest.mark.parametrize(
    "frame",
    [
        f.frame(f.DATA, f.PADDED, 1, b"\x04abc"),
        f.frame(f.DATA, f.PADDED, 1, b"\xff"),
        f.frame(f.HEADERS, f.PADDED | f.END_HEADERS, 3, b"\x05abcd"),
    ],
)
def test_padding_longer_than_the_frame(frame: bytes) -> None:
    raw = Raw()
    raw.send(f.headers(1), frame)
    assert raw.goaway == code.PROTOCOL_ERROR


@case(8, "RFC 9113 6.1")
def test_padding_is_not_body() -> None:
    raw = Raw()
    padded = bytes((3,)) + f.block(f.POST) + bytes(3)
    raw.send(f.frame(f.HEADERS, f.PADDED | f.END_HEADERS, 1, padded))
    raw.send(f.frame(f.DATA, f.PADDED | f.END_STREAM, 1, b"\x02{}" + bytes(2)))
    assert raw.requests()[0].body == b"{}"
