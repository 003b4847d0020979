"""Every check of `sections.py`, over a socket, in cleartext and over TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence

import pytest
import uvloop

from evap.config import ServerConfig
from evap.protocol.tls import server_context
from tests.conformance.checks import Check
from tests.conformance.sections import SECTIONS
from tests.protocol import frames as f
from tests.protocol.joined import Out
from tests.protocol.serving import App, serving
from tests.support import TIME_FACTOR

#: For answers that take a millisecond.
SOON_S = 3.0 * TIME_FACTOR
END = f.frame(f.PING, 0, 0, b"the end ")


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """Two listening ports of one thread: "h2c" and "tls"."""
    found: dict[str, int] = {}
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        context = server_context(ServerConfig(tls="self-signed"))
        async with (
            serving(App(), max_concurrent_streams=16) as (_, clear),
            serving(App(), context, max_concurrent_streams=16) as (_, tls),
        ):
            found.update(h2c=clear, tls=tls)
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, done.wait)

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    assert ready.wait(SOON_S)
    yield found
    done.set()
    thread.join(SOON_S)


class Peer:
    """A client of raw frames on a blocking socket."""

    def __init__(self, port: int, tls: bool) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), SOON_S)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            self.socket = context.wrap_socket(self.socket)
        self.out: list[Out] = []
        self.open = True
        self._rest = b""

    def read(self) -> None:
        try:
            data = self.socket.recv(65_536)
        except ConnectionError:
            data = b""
        except TimeoutError:
            pytest.fail(f"nothing more came after {self.out}")
        self.open = bool(data)
        self._rest += data
        while len(self._rest) >= 9 and len(self._rest) >= (whole := 9 + int.from_bytes(self._rest[:3])):
            kind, flags, sid = self._rest[3], self._rest[4], int.from_bytes(self._rest[5:9])
            self.out.append(Out(kind, flags, sid, self._rest[9:whole]))
            self._rest = self._rest[whole:]


def barrier(number: int) -> bytes:
    return f.frame(f.PING, 0, 0, b"portion%d" % number)


def talk(peer: Peer, check: Check) -> Sequence[Out]:
    """What has come back when the expectation holds, or the connection is closed."""
    last = len(check.send) - 1
    for number, portion in enumerate(check.send):
        hello = f.hello(*check.settings) if number == 0 else b""
        peer.socket.sendall(hello + portion + (END if number == last else barrier(number)))
        while number < last and peer.open and not any(o.payload == b"portion%d" % number for o in peer.out):
            peer.read()
    while peer.open and not check.expect(peer.out):
        peer.read()
    return peer.out


@pytest.mark.parametrize("transport", ["h2c", "tls"])
@pytest.mark.parametrize("check", SECTIONS, ids=lambda c: f"{c.section[4:]} {c.what}")
def test_section(ports: dict[str, int], check: Check, transport: str) -> None:
    peer = Peer(ports[transport], transport == "tls")
    try:
        out = talk(peer, check)
        assert check.expect(out), out
    finally:
        peer.socket.close()


def test_a_check_can_fail(ports: dict[str, int]) -> None:
    """Each expectation is false for a connection on which nothing was said."""
    peer = Peer(ports["h2c"], tls=False)
    peer.socket.sendall(f.hello() + f.frame(f.PING, 0, 0, bytes(6)))
    while peer.open:
        peer.read()
    peer.socket.close()
    ended = [o for o in peer.out if o.type == f.GOAWAY]
    assert ended
    only = [check.what for check in SECTIONS if check.expect([])]
    assert not only
