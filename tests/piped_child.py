"""The other end of tests/test_pipe.py: when it is told a number, it says all numbers below it and ends with it."""

from __future__ import annotations

import os
import socket
import sys

import msgspec


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    told = msgspec.msgpack.decode(sock.recv(1 << 16))["what"]
    for number in range(told):
        sock.send(msgspec.msgpack.encode({"what": number}))
    os._exit(told)


if __name__ == "__main__":
    main()
