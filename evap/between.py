"""What a server's parent process and its loop processes say to each other: msgpack over a SOCK_SEQPACKET socket pair.

One message is one packet; descriptors travel beside it (SCM_RIGHTS). Nothing of a token goes here: loop processes have
channels of their own to the engine (`engine/channel.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from evap.config import Config
from evap.messages import EngineInfo

MAX_PACKET_BYTES: Final = 160 << 10
MAX_FDS: Final = 8


class Message(msgspec.Struct, array_like=True, tag=str.lower):
    pass


class Start(Message):
    """The first one. What the process is, and the descriptors that it has inherited.

    tcp: (host, port) to listen on with SO_REUSEPORT. listening: descriptors of sockets that all processes accept from.
    accounts: descriptor of `SharedAccounts` and its rows; operations: of `SharedOperations`.
    secret: for cache salts. certificate: (certificate, key) in PEM, where the parent has made them.
    """

    number: int
    count: int
    config: Config
    tcp: tuple[str, int] | None
    listening: list[int]
    accounts: int
    rows: int
    operations: int
    secret: bytes
    certificate: tuple[bytes, bytes] | None = None


class Engine(Message):
    """How the engine is, and a line about it. That it is ready is said by `Way`."""

    state: str
    line: str


class Way(Message):
    """A channel to the engine, which is ready: socket, ring memory and doorbell come with it."""

    capacity: int
    info: EngineInfo


class Signal(Message):
    """SIGTERM or SIGHUP, which loop processes take from their parent only: service managers send theirs to all."""

    number: int


class Question(Message):
    """Asked of a loop process; or by one, of all others. id: the asker's."""

    id: int
    kind: str  # "metrics" | "usage" | "flush"
    about: str = ""


class Answer(Message):
    id: int
    data: bytes


class Up(Message):
    """It accepts connections, and the engine is ready."""

    model: str
    chat: bool
    info: EngineInfo


class Want(Message):
    """A channel to the engine, please. meter: our counters page for it."""

    meter: dict[str, str] | None


ToChild = Start | Engine | Way | Signal | Question | Answer
FromChild = Up | Want | Question | Answer
T = TypeVar("T")


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Pipe(Generic[T]):
    """One end. on_message: a message and the descriptors with it (the receiver's to close). on_end: once."""

    def __init__(
        self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T], *,
        on_message: Callable[[T, list[int]], None], on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._sock, self._decoder = sock, decoder
        self._on_message, self._on_end = on_message, on_end
        self._encode = msgspec.msgpack.Encoder().encode
        self._out: deque[tuple[bytes, list[int]]] = deque()
        self._open = True
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """`fds` are copied before this returns; the caller keeps its own."""
        if self._open:
            self._out.append((self._encode(message), [os.dup(fd) for fd in fds]))
            if len(self._out) == 1:
                self._flush()

    def _flush(self) -> None:
        while self._out:
            data, fds = self._out[0]
            try:
                socket.send_fds(self._sock, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._writable)
                return
            except OSError:  # it is gone; `_readable` finds that out
                pass
            self._out.popleft()
            for fd in fds:
                os.close(fd)

    def _writable(self) -> None:
        self._loop.remove_writer(self._sock)
        self._flush()

    def _readable(self) -> None:
        while self._open:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, MAX_PACKET_BYTES, MAX_FDS)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                self._on_end()
                return
            self._on_message(self._decoder.decode(data), fds)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for _, fds in self._out:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._out.clear()
