"""Socket options, addresses, and the direct write that must never change order."""

from __future__ import annotations

import os
import socket

import pytest

from evap.errors import StartupError
from evap.protocol import sockets


class Buffer:
    """A transport that keeps what it is given."""

    def __init__(self, closing: bool = False) -> None:
        self.data = b""
        self.closing = closing

    def write(self, data: bytes | memoryview, /) -> None:
        self.data += bytes(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return len(self.data)


@pytest.fixture
def pair() -> tuple[int, int]:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    return reading, writing


def test_a_write_goes_straight_to_the_socket(pair: tuple[int, int]) -> None:
    transport = Buffer()
    assert sockets.write(transport, pair[1], [b"one ", memoryview(b"piece")]) == 0
    assert os.read(pair[0], 100) == b"one piece"
    assert transport.data == b""


def test_what_the_socket_does_not_take_waits_in_the_transport_and_so_does_all_that_follows(
    pair: tuple[int, int],
) -> None:
    transport = Buffer()
    first = os.urandom(1 << 20)
    left = sockets.write(transport, pair[1], [first])
    assert 0 < left < len(first)
    got = os.read(pair[0], 1 << 20)  # the pipe is empty again, but the transport is not
    assert sockets.write(transport, pair[1], [b"second"]) == left + 6
    assert got + transport.data == first + b"second"


def test_tls_and_closing_transports_are_left_alone(pair: tuple[int, int]) -> None:
    over_tls, closing = Buffer(), Buffer(closing=True)
    sockets.write(over_tls, -1, [b"x"])
    sockets.write(closing, pair[1], [b"y"])
    assert (over_tls.data, closing.data) == (b"x", b"y")


def test_a_broken_socket_is_the_transports_business(pair: tuple[int, int]) -> None:
    os.close(pair[0])
    transport = Buffer()
    assert sockets.write(transport, pair[1], [b"x"]) == 1
    assert transport.data == b"x"


def test_no_delay() -> None:
    with socket.socket() as sock:
        sockets.no_delay(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    sockets.no_delay(sock)  # closed: nothing to set, nothing raised
    sockets.no_delay(None)


def test_addresses() -> None:
    assert sockets.address(("127.0.0.1", 80)) == "127.0.0.1:80"
    assert sockets.address(("::1", 80, 0, 0)) == "[::1]:80"
    assert sockets.address("") == "unix"
    assert sockets.address(None) == ""


def test_a_taken_port_is_said_with_a_remedy() -> None:
    with sockets.listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is taken") as caught:
            sockets.listen("127.0.0.1", port)
    assert "--port 0" in caught.value.remedy


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(StartupError, match="cannot listen"):
        sockets.listen("no such host.invalid", 0)


def test_reading_goes_on_when_nothing_stands_against_it() -> None:
    calls: list[str] = []

    class Transport:
        def pause_reading(self) -> None:
            calls.append("pause")

        def resume_reading(self) -> None:
            calls.append("resume")

    reading, transport = sockets.Reading(), Transport()
    reading.pause(transport, sockets.Why.STUFFED)
    reading.pause(transport, sockets.Why.BEHIND)
    reading.pause(transport, sockets.Why.BEHIND)
    reading.resume(transport, sockets.Why.STUFFED)
    assert calls == ["pause"]
    reading.resume(transport, sockets.Why.BEHIND)
    reading.resume(transport, sockets.Why.BEHIND)
    assert calls == ["pause", "resume"]
    reading.pause(None, sockets.Why.BEHIND)
    reading.resume(None, sockets.Why.BEHIND)
