"""Invariant: HTTP/1.1 bytes in any portions (the first byte says which) make the same requests and statuses, and every
request that evap accepts is one that h11 accepts too and reads alike. So what is ambiguous is refused."""

import contextlib
import re

import h11

from evap.config import ProtocolConfig
from evap.protocol.events import RequestReady
from evap.protocol.http1 import Http1Core
from fuzz.runner import main


def by_evap(data: bytes, step: int) -> tuple[list[tuple[object, ...]], list[bytes]]:
    requests: list[tuple[object, ...]] = []
    core, out = Http1Core(ProtocolConfig()), b""
    for at in range(0, len(data), step):
        events = core.receive(data[at : at + step], 0)
        while events and isinstance(event := events[0], RequestReady):
            head = event.head
            requests.append((head.method, head.path, head.query, head.version, event.body))
            event.reply.whole(204, (), b"")
            out += b"".join(core.take_output())
            events = core.written(0, 0)
        out += b"".join(core.take_output())
    return requests, re.findall(rb"HTTP/1.1 [2-5]..", out)


def by_h11(data: bytes) -> list[tuple[object, ...]]:
    """The requests, until one is refused or the connection would close."""
    requests: list[tuple[object, ...]] = []
    with contextlib.suppress(h11.RemoteProtocolError):
        while data:
            server = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
            server.receive_data(data.removeprefix(b"\r\n"))  # RFC 9112 2.2; h11 refuses an empty line
            head, body = server.next_event(), b""
            while isinstance(event := server.next_event(), h11.Data):
                body += event.data
            if not isinstance(head, h11.Request) or not isinstance(event, h11.EndOfMessage):
                break
            target = re.sub("^[^:/*]+://[^/?]*", "", head.target.decode()) or "/*"[head.method == b"OPTIONS"]  # 3.2.2
            path, _, query = (target if target[0] in "/*" else "/" + target).partition("?")
            requests.append((head.method.decode(), path, query, head.http_version.decode(), body))
            server.send(h11.Response(status_code=404, headers=[]))
            server.send(h11.EndOfMessage())
            data = server.trailing_data[0] if server.our_state is h11.DONE else b""
    return requests


def one_input(data: bytes) -> None:
    step, data = (data[0] % 64 + 1 if data else 1), data[1:]
    requests, statuses = by_evap(data, step)
    assert (requests, statuses) == by_evap(data, len(data) or 1), "portions matter"
    last = next((n for n, r in enumerate(requests, 1) if r[3] == "1.0"), len(requests))  # h11 keeps no 1.0 connection
    assert by_h11(data)[:last] == requests[:last]


if __name__ == "__main__":
    main(one_input, "http1")
