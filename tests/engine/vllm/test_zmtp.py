"""ZMTP as libzmq speaks it: its own octets as they were recorded, in any cut, and what is no such thing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.vllm.zmtp import GREETING, Peer, Stage, ZmtpError, command, head, metadata, pieces, properties

#: what a DEALER of libzmq 4.3.5 sends when it has connected, its identity being two zeros
LIBZMQ = (
    b"\xff" + bytes(7) + b"\x03\x7f\x03\x01NULL" + bytes(48) + b"\x04+\x05READY"
    b"\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x02\x00\x00"
)  # fmt: skip


def peer(after: bytes = LIBZMQ) -> Peer:
    made = Peer("ROUTER", "DEALER")
    made.receive(memoryview(after))
    return made


def wire(*messages: list[bytes]) -> bytes:
    return b"".join(piece for message in messages for piece in pieces(message))


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    at = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(at) if end > begin]


def test_libzmqs_greeting_is_understood_and_answered() -> None:
    made = peer()
    assert made.stage is Stage.TRAFFIC
    assert made.identity == b"\0\0"
    ours = made.take_output()
    assert ours.startswith(GREETING)
    assert len(GREETING) == 64
    assert ours[64:66] == bytes((4, len(ours) - 66))
    assert ours[66:72] == b"\x05READY"
    assert properties(ours[72:]) == {b"socket-type": b"ROUTER", b"identity": b""}
    assert made.take_output() == b""


BODY = st.one_of(st.binary(max_size=20), st.integers(250, 70_000).map(bytes))


@given(
    messages=st.lists(st.lists(BODY, min_size=1, max_size=4), max_size=6), places=st.lists(st.integers(0), max_size=9)
)
def test_messages_come_whole_however_the_octets_are_cut(messages: list[list[bytes]], places: list[int]) -> None:
    made = Peer("ROUTER", "DEALER")
    found = []
    for piece in cut(LIBZMQ + wire(*messages), places):
        found += made.receive(memoryview(piece))
    assert found == messages


def test_a_message_in_one_read_is_a_copy() -> None:
    """The buffer that it came in is used again."""
    data = bytearray(wire([b"x" * 300]))
    made = peer()
    (message,) = made.receive(memoryview(data))
    data[:] = bytes(len(data))
    assert message == [b"x" * 300]


def test_octet_by_octet() -> None:
    made = Peer("ROUTER", "DEALER")
    messages = [[b"a", b"b" * 300, b""], [b"c"]]
    found = []
    for octet in LIBZMQ + wire(*messages):
        found += made.receive(memoryview(bytes((octet,))))
    assert found == messages


def test_a_heartbeat_is_answered_even_inside_a_message() -> None:
    made = peer()
    made.take_output()
    first, last = wire([b"1", b"2"])[:3], wire([b"1", b"2"])[3:]
    assert made.receive(memoryview(first + command(b"PING", b"\x00\x0acontext") + last)) == [[b"1", b"2"]]
    assert made.take_output() == command(b"PONG", b"context")
    assert made.receive(memoryview(command(b"PONG", b"") + command(b"SUBSCRIBE", b"x"))) == []
    assert made.take_output() == b""


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"PRI * HTTP/2.0\r\n".ljust(64), "not ZMTP 3"),
        (LIBZMQ[:10] + b"\x02" + LIBZMQ[11:], "not ZMTP 3"),
        (LIBZMQ[:12] + b"CURVE" + LIBZMQ[17:], "not the NULL mechanism"),
        (LIBZMQ[:64] + wire([b"hello"]), "a message before READY"),
        (LIBZMQ[:64] + command(b"HELLO", b""), "where READY was expected"),
        (LIBZMQ[:64] + command(b"READY", metadata(Socket_Type=b"PULL")), "a peer of type b'PULL'"),
        (LIBZMQ[:64] + command(b"READY", b""), "a peer of type None"),
        (LIBZMQ[:64] + command(b"READY", b"\x40Socket"), "within a property"),
        (LIBZMQ[:64] + command(b"READY", b"\x01S\x00\x00\x00\x09DEALER"), "within a property"),
        (LIBZMQ[:64] + command(b"ERROR", b"\x03not"), "the peer refuses: not"),
        (LIBZMQ + b"\x08\x00", "flags 0x08"),
        (LIBZMQ + b"\x02" + b"\xff" * 8, "octets"),
    ],
)
def test_what_is_no_zmtp_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(ZmtpError, match=told):
        peer(data)


@given(data=st.binary(max_size=200), greeted=st.booleans())
def test_any_octets_give_messages_or_the_error(data: bytes, greeted: bool) -> None:
    made = Peer("ROUTER", "DEALER")
    try:
        made.receive(memoryview((LIBZMQ if greeted else b"") + data))
    except ZmtpError:
        return
    assert made.stage is not Stage.READY or greeted or len(data) >= 64


def test_the_octets_of_an_array_are_counted_not_its_elements() -> None:
    """vLLM's encoder hands over arrays as they are."""
    array = np.arange(600, dtype=np.float32).reshape(3, 200)
    data = b"".join(pieces([b"\x00", array.data, memoryview(b"end")]))
    assert peer().receive(memoryview(data)) == [[b"\x00", array.tobytes(), b"end"]]


def test_a_head_says_how_long_the_body_is() -> None:
    assert head(0, 255) == b"\x00\xff"
    assert head(1, 256) == b"\x03" + bytes(6) + b"\x01\x00"
