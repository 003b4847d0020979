"""Invariant: HTTP/2 bytes in any portions (the first byte says which) leave the same requests open, have made the same
resets and the same last word; nothing but events ever comes out, and after the end nothing is kept."""

from evap.config import ProtocolConfig
from evap.protocol.connection import Http2Core
from evap.protocol.events import RequestReady, StreamCancelled
from evap.protocol.gate import GOAWAY, HEADER, HEADERS, RST_STREAM
from fuzz.runner import main

CONFIG = ProtocolConfig(max_body_bytes=1000, max_concurrent_streams=4, control_burst=30, reset_burst=5)


def frames(wire: bytes) -> list[tuple[int, int, bytes]]:
    found = []
    while wire:
        high, low, kind, _, sid = HEADER.unpack_from(wire)
        size = high << 8 | low
        found.append((kind, sid, wire[9 : 9 + size]))
        wire = wire[9 + size :]
    return found


def life(data: bytes, step: int) -> tuple[object, ...] | None:
    """What is left at the end; None after an early answer or a friendly goodbye, which are a matter of when."""
    core, ready = Http2Core(CONFIG), {}
    wire = b"".join(core.take_output())
    portions = [data[at : at + step] for at in range(0, len(data), step)]
    while portions or core.unread:
        for event in core.receive(b"" if core.unread else portions.pop(0), 0):
            if isinstance(event, RequestReady):
                ready[id(event.reply)] = event
            elif isinstance(event, StreamCancelled):
                del ready[id(event.reply)]  # KeyError: it was never handed over
        wire += b"".join(core.take_output())
        core.written(0, 0)
    open_requests = [(r.head.method, r.head.path, r.head.headers, r.body) for r in ready.values()]
    out = frames(wire)
    resets = sorted((sid, code) for kind, sid, code in out if kind == RST_STREAM)
    last = [payload[4:] for kind, _, payload in out if kind == GOAWAY]
    assert len(last) <= 1
    assert bool(last) == core.closing
    core.eof(0)
    assert (core.streams, core.shared.body_bytes, core.take_output()) == ({}, 0, []), "something is kept"
    early = any(kind == HEADERS for kind, _, _ in out) or last == [bytes(4)]
    return None if early else (open_requests, resets, last)


def one_input(data: bytes) -> None:
    step, data = (data[0] % 64 + 1 if data else 1), data[1:]
    portions, whole = life(data, step), life(data, len(data) or 1)
    assert portions is None or whole is None or portions == whole, "portions matter"


if __name__ == "__main__":
    main(one_input, "http2")
