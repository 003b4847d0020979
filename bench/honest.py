"""Honest connections: nine HTTP/2 clients that stream paced tokens and count them, in one cheap process."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from typing import Any, Final

from bench.attacks import BLOCK, DATA, HEADERS, PREFACE, WINDOW_UPDATE, frame, settings

WIDE: Final = (1 << 31) - 1
BODY: Final = json.dumps(
    {"model": "synthetic", "messages": [{"role": "user", "content": "honest"}], "max_tokens": 100_000,
     "ignore_eos": True, "stream": True}
).encode()  # fmt: skip
TOKEN: Final = b'"content":"'


def hello(streams: int) -> bytes:
    asked = b"".join(frame(HEADERS, 4, sid, BLOCK) + frame(DATA, 1, sid, BODY) for sid in range(1, 2 * streams + 1, 2))
    window = frame(WINDOW_UPDATE, 0, 0, (WIDE - 65_535).to_bytes(4))
    return PREFACE + settings((4, WIDE)) + window + frame(4, 1, 0) + asked


def honest(port: int, connections: int, streams: int, core: int, totals: Any, stop: Any) -> None:
    """A process of its own. totals: shared doubles [tokens so far, longest silence of a connection in s, lost ones].

    The longest silence is since the reader last set it to 0.
    """
    os.sched_setaffinity(0, {core})
    selector = selectors.DefaultSelector()
    last: dict[socket.socket, float] = {}
    for _ in range(connections):
        one = socket.create_connection(("127.0.0.1", port), 10.0)
        one.sendall(hello(streams))
        selector.register(one, selectors.EVENT_READ)
        last[one] = time.monotonic()
    while not stop.is_set():
        for key, _ in selector.select(0.1):
            one = key.fileobj
            assert isinstance(one, socket.socket)
            try:
                data = one.recv(1 << 18)
            except OSError:
                data = b""
            now = time.monotonic()
            if not data:
                selector.unregister(one)
                totals[2] += 1
                continue
            totals[0] += data.count(TOKEN)
            totals[1] = max(totals[1], now - last[one])
            last[one] = now
    for one in last:
        one.close()
