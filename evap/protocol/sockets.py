"""What the shell does to a socket, without a loop: options, addresses, and the direct write."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import socket
from collections.abc import Sequence
from typing import Final, Protocol

from evap.errors import Overloaded, StartupError
from evap.protocol.headers import error_body

_BODY: Final = error_body(Overloaded("too many connections"))
#: For a connection over the limit, before anybody knows what it speaks.
TURNED_AWAY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY)
) + _BODY


class Transport(Protocol):
    """The part of asyncio.WriteTransport that `write` needs."""

    def write(self, data: bytes | memoryview, /) -> None: ...
    def is_closing(self) -> bool: ...
    def get_write_buffer_size(self) -> int: ...


class Why(enum.IntFlag):
    """Why a connection is not read from."""

    STUFFED = 1  #: what we have written is not taken
    BEHIND = 2  #: what we have read is not handled


class Pausable(Protocol):
    """The part of asyncio.ReadTransport that `Reading` needs."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Reading:
    """A transport is read from while there is no reason against it."""

    __slots__ = ("why",)

    def __init__(self) -> None:
        self.why = 0

    def pause(self, transport: Pausable | None, why: Why) -> None:
        if transport is not None and not self.why:
            transport.pause_reading()
        self.why |= why

    def resume(self, transport: Pausable | None, why: Why) -> None:
        if transport is not None and self.why == why:
            transport.resume_reading()
        self.why &= ~why


def write(transport: Transport, fd: int, out: Sequence[bytes | memoryview]) -> int:
    """`write_one` of all parts, joined: a system call costs more than the copy."""
    return write_one(transport, fd, out[0] if len(out) == 1 else b"".join(out))


def write_one(transport: Transport, fd: int, data: bytes | memoryview) -> int:
    """Write now; returns the octets that the transport still holds.

    uvloop and asyncio keep small writes until the end of the loop pass. With nothing queued the socket may be written
    to directly, which is sooner and cheaper; what it does not take goes through the transport, so that order, errors
    and the end of a connection stay its business. fd: of a plain TCP connection, -1 over TLS (records are not ours).
    """
    if fd >= 0 and not transport.is_closing() and not transport.get_write_buffer_size():
        try:
            sent = os.write(fd, data)
        except OSError:  # full, or broken: the transport finds out which
            sent = 0
        if sent == len(data):
            return 0
        data = memoryview(data)[sent:]
    transport.write(data)
    return transport.get_write_buffer_size()


def no_delay(sock: socket.socket | None) -> None:
    """Frames are written when they are complete; Nagle's algorithm would hold the last one back for a round trip."""
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def address(peername: object) -> str:
    """host:port for logs, an IPv6 address in brackets; "unix" for the nameless peer of a UNIX socket."""
    if isinstance(peername, tuple) and len(peername) >= 2:
        host, port = peername[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return "" if peername is None else str(peername or "unix")


def listen(host: str, port: int, *, reuse_port: bool = False, now: bool = True) -> socket.socket:
    """A listening TCP socket. Raises StartupError when the address is taken or not ours.

    reuse_port: beside others of this user; the kernel spreads connections over them. now: False binds only, so that
    it gets none until its user listens.
    """
    try:
        family, kind, proto, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, proto)
    except OSError as error:
        raise _explain(error, host, port) from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(place)
        if now:
            listening.listen(4096)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise _explain(error, host, port) from None
    return listening


def reserve(host: str, port: int) -> socket.socket:
    """An address that several processes are to listen on with SO_REUSEPORT: bound, so that it stays ours, and deaf.

    Raises StartupError as `listen` does, also for an address that others share.
    """
    with listen(host, port) as probe:
        family, place = probe.family, probe.getsockname()
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(place)
    except OSError as error:
        reserved.close()
        raise _explain(error, host, port) from None
    return reserved


def _explain(error: OSError, host: str, port: int) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is taken", remedy="--port 0 picks a free one")
    if error.errno == errno.EACCES:
        return StartupError(f"port {port} needs more rights than this user has", remedy="a --port above 1023")
    return StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}", remedy="--host 127.0.0.1")
