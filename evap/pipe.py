"""A pipe between two processes: msgspec structs over a SOCK_SEQPACKET socket pair, one message a packet.

Descriptors travel beside a message (SCM_RIGHTS). Everything runs on the loop's thread, and nothing waits.
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

from evap.child import Child

MAX_PACKET_BYTES: Final = 160 << 10
MAX_FDS: Final = 8
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
        self._loop.add_reader(sock, self.read)

    @property
    def queued(self) -> int:
        """Messages that have found no room in the socket yet: the other end does not read."""
        return len(self._out)

    @property
    def takes(self) -> bool:
        """The other end is there, and reads."""
        return self._open and not self._out

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """`fds` stay the caller's. What finds no room is kept; if the system takes it in no way, the pipe ends."""
        if not self._open:
            return
        data = self._encode(message)
        if self._out or not self._sent(data, fds):
            self._out.append((data, [os.dup(fd) for fd in fds]))
            if len(self._out) == 1:
                self._loop.add_writer(self._sock, self._writable)

    def _sent(self, data: bytes, fds: Sequence[int]) -> bool:
        """False: there is no room."""
        try:
            socket.send_fds(self._sock, [data], fds)
        except BlockingIOError:
            return False
        except OSError:  # it is gone, or too many descriptors are on their way
            self._loop.call_soon(self._lost)
        return True

    def _writable(self) -> None:
        while self._out and self._sent(*self._out[0]):
            for fd in self._out.popleft()[1]:
                os.close(fd)
        if not self._out:
            self._loop.remove_writer(self._sock)

    def _lost(self) -> None:
        self.read()
        self._end()

    def _end(self) -> None:
        if self._open:
            self.close()
            self._on_end()

    def read(self) -> None:
        """Hand on all that the socket holds now."""
        while self._open:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, MAX_PACKET_BYTES, MAX_FDS)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._end()
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


class PipedChild(Child, Generic[T]):
    """A child with a pipe to it: its end of the socket pair is its only argument. `fds` are inherited as they are.

    on_exit: as of `Child`; what it had said has been read before. on_end: it has closed its end, but may still run.
    """

    def __init__(
        self, module: str, decoder: msgspec.msgpack.Decoder[T], fds: Sequence[int] = (), *,
        on_message: Callable[[T, list[int]], None], on_exit: Callable[[int], None], on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        ours, theirs = pair()
        try:
            number = theirs.fileno()
            super().__init__(module, [number], [number, *fds], on_exit=on_exit)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pipe = Pipe(ours, decoder, on_message=on_message, on_end=on_end)

    def end(self) -> None:
        self.pipe.close()
        super().end()

    def _ended(self) -> None:
        self.pipe.read()
        self.pipe.close()
        super()._ended()
