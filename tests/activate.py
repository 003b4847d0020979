"""A service manager in small: listens, then becomes a server that is passed its sockets (sd_listen_fds(3)).

python -m tests.activate PORTS PATH ARGS: so many TCP sockets on free loopback ports, one UNIX socket at PATH.
"""

from __future__ import annotations

import os
import socket
import sys


def main(ports: int, path: str, *args: str) -> None:
    made = [socket.create_server(("127.0.0.1", 0)) for _ in range(ports)]
    made.append(socket.socket(socket.AF_UNIX))
    made[-1].bind(path)
    made[-1].listen()
    copies = [os.dup(one.fileno()) for one in made]  # the places 3 and up may hold the originals
    high = [os.dup2(fd, 100 + n) for n, fd in enumerate(copies)]
    for n, fd in enumerate(high):
        os.dup2(fd, 3 + n, inheritable=True)
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(made)), LISTEN_FDNAMES="http:local")
    for fd in high:
        os.set_inheritable(fd, False)
    os.execv(sys.executable, [sys.executable, "-m", "evap", "serve", *args])


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
