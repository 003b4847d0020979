"""Where a server listens: a TCP port, a UNIX socket, and whatever a service manager hands over (systemd's LISTEN_FDS).

A UNIX socket's file is ours from bind to exit: one that a killed server left is replaced, one that somebody still
listens on is not, and at the end it is removed only if it is still the file that we made.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final

from evap.config import ServerConfig
from evap.errors import StartupError
from evap.protocol import sockets

#: The first descriptor that a service manager passes (sd_listen_fds(3)).
FIRST_FD: Final = 3
NO_TCP: Final = "none"
BACKLOG: Final = 4096
_PASSED: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_MODE = re.compile(r"0?[0-7]{3}").fullmatch


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket, non-blocking. path: its file, if that is ours to remove."""

    sock: socket.socket
    path: str = ""
    inode: int = 0

    @property
    def unix(self) -> bool:
        return self.sock.family == socket.AF_UNIX

    @property
    def name(self) -> str:
        """As people write it: host:port, or unix:PATH."""
        return f"unix:{self.sock.getsockname()}" if self.unix else sockets.address(self.sock.getsockname())

    def close(self) -> None:
        self.sock.close()
        if self.path:
            with contextlib.suppress(OSError):
                if os.stat(self.path).st_ino == self.inode:
                    os.unlink(self.path)


def open_all(config: ServerConfig, passed: Sequence[socket.socket] = ()) -> list[Listener]:
    """TCP first. Sockets that were passed to us take the place of --host and --port. Raises StartupError."""
    listeners = [Listener(sock) for sock in passed]
    try:
        if not passed and config.host != NO_TCP:
            listeners.append(Listener(sockets.listen(config.host, config.port)))
        if config.uds:
            listeners.append(unix(config.uds, config.uds_mode))
    except StartupError:
        close_all(listeners)
        raise
    if not listeners:
        raise StartupError("there is nothing to listen on", remedy="--uds PATH, or a --host")
    return sorted(listeners, key=lambda listener: listener.unix)


def close_all(listeners: Sequence[Listener]) -> None:
    for listener in listeners:
        listener.close()


def addresses(listeners: Sequence[Listener]) -> tuple[str, int, tuple[str, ...]]:
    """(host, port) of the first TCP port, ("", 0) without one, and the paths of all UNIX sockets."""
    places = [listener.sock.getsockname() for listener in listeners if not listener.unix]
    host, port = places[0][:2] if places else ("", 0)
    return host, port, tuple(os.fsdecode(one.sock.getsockname()) for one in listeners if one.unix)


def unix(path: str, mode: str) -> Listener:
    """A UNIX socket with the permissions `mode` (octal digits). Raises StartupError."""
    if not _MODE(mode):
        raise StartupError(f"--uds-mode {mode} is not a mode", remedy="three octal digits, such as 660")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_room(path)
        listening.bind(path)
        os.chmod(path, int(mode, 8))  # before `listen`: until then nobody can connect
        listening.listen(BACKLOG)
        listening.setblocking(False)
        return Listener(listening, path, os.stat(path).st_ino)
    except StartupError:
        listening.close()
        raise
    except OSError as error:
        listening.close()
        raise StartupError(
            f"cannot listen on {path}: {error.strerror or error}", remedy="a --uds PATH of ours"
        ) from None


def _make_room(path: str) -> None:
    """Remove the socket of a server that is gone. Raises StartupError for anything else that is there."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise StartupError(f"{path} exists and is no socket", remedy="another --uds PATH")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody listens
    raise StartupError(f"another server listens on {path}", remedy="another --uds PATH")


def passed(environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """The listening sockets that a service manager started us with; nobody that we start takes them for its own.

    Raises StartupError for a descriptor that is no listening stream socket.
    """
    given = {name: environ.pop(name, "") for name in _PASSED}
    if given["LISTEN_PID"] != str(pid) or not given["LISTEN_FDS"].isdecimal():
        return []
    return [take(fd) for fd in range(FIRST_FD, FIRST_FD + int(given["LISTEN_FDS"]))]


def take(fd: int) -> socket.socket:
    """An inherited descriptor as a listening socket of this process alone."""
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise StartupError(f"descriptor {fd} is no socket: {error.strerror or error}") from None
    if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise StartupError(f"descriptor {fd} is no listening stream socket", remedy="ListenStream= in the .socket unit")
    sock.setblocking(False)
    return sock
