"""Bodies in memory files: what is counted, when it is freed, and what both wire cores do with them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from evap.protocol.events import RequestReady
from evap.protocol.http1 import Http1Core
from evap.protocol.limits import Shared
from evap.protocol.spool import Spool
from tests.protocol import frames as f
from tests.protocol.joined import Raw, configured

OVER = 1000
PIECES = [bytes([n]) * 400 for n in range(10)]


def content(spool: Spool) -> bytes:
    return os.pread(spool.fd, 1 << 20, 0)


def shared() -> Shared:
    return Shared(spool_over=OVER)


def http1(house: Shared, **changes: Any) -> Http1Core:
    return Http1Core(configured(**changes), peer="", shared=house)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_spool_is_counted_until_it_is_freed() -> None:
    house, before = shared(), descriptors()
    house.body_bytes = 800  # its first pieces are counted already
    spool = Spool(house, PIECES[:2])
    spool.write(PIECES[2])
    assert (house.body_bytes, spool.size, content(spool)) == (1200, 1200, b"".join(PIECES[:3]))
    spool.free()
    assert house.body_bytes == 0
    spool.close()
    spool.close()
    assert (house.body_bytes, descriptors()) == (0, before)


def test_a_spool_that_is_lost_is_closed() -> None:
    house, before = Shared(body_bytes=400), descriptors()
    Spool(house, PIECES[:1])
    assert (house.body_bytes, descriptors()) == (0, before)


def test_http_2() -> None:
    raw = Raw(shared=shared())
    raw.send(f.headers(1), *[f.data(1, piece) for piece in PIECES], f.data(1, b"end", end=True))
    raw.send(f.post(3, bytes(OVER)))
    large, small = (request.body for request in raw.requests())
    assert isinstance(large, Spool)
    assert content(large) == b"".join(PIECES) + b"end"
    assert small == bytes(OVER)
    assert raw.shared.body_bytes == large.size
    large.close()
    assert raw.shared.body_bytes == 0


@pytest.mark.parametrize("chunked", [False, True])
def test_http_1(chunked: bool) -> None:
    house = shared()
    core = http1(house)
    body = b"".join(PIECES)
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    parts = [b"%x\r\n%b\r\n" % (len(p), p) for p in PIECES] + [b"0\r\n\r\n"] if chunked else PIECES
    events = core.receive(b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n", 0)
    for part in parts:
        events += core.receive(part, 0)
    assert [type(event) for event in events] == [RequestReady]
    assert isinstance(events[0], RequestReady)
    spool = events[0].body
    assert isinstance(spool, Spool)
    assert (content(spool), house.body_bytes) == (body, len(body))
    spool.close()
    assert house.body_bytes == 0


def test_what_never_becomes_a_request_is_freed() -> None:
    before = descriptors()
    raw, house = Raw(shared=shared()), shared()
    half = [f.data(1, piece) for piece in PIECES]
    raw.send(f.headers(1), *half)
    assert raw.shared.body_bytes == 4000
    raw.send(f.rst(1))
    core = http1(house)
    core.receive(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", 0)
    for piece in PIECES:
        core.receive(piece, 0)
    assert (house.body_bytes, descriptors()) == (4000, before + 1)
    core.eof(0)
    assert (raw.shared.body_bytes, house.body_bytes, descriptors()) == (0, 0, before)


def test_all_bodies_together_are_bounded() -> None:
    raw = Raw(shared=shared(), max_buffered_body_bytes=2000)
    raw.send(f.headers(1), *[f.data(1, piece) for piece in PIECES[:5]])
    assert raw.status(1) is None
    raw.send(f.data(1, b"x"))
    assert raw.status(1) == 503
    assert raw.shared.body_bytes == 0


@pytest.mark.parametrize("fails", ["memfd_create", "write"])
def test_a_system_without_memory_is_said_to_be_busy(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no")

    raw, house = Raw(shared=shared()), shared()
    core = http1(house)
    with monkeypatch.context() as patch:
        patch.setattr(f"evap.protocol.spool.os.{fails}", refuse)
        raw.send(f.headers(1), *[f.data(1, piece) for piece in PIECES[:4]])
        core.receive(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", 0)
        for piece in PIECES[:4]:
            core.receive(piece, 0)
    assert raw.status(1) == 503
    assert b"".join(core.take_output()).startswith(b"HTTP/1.1 503 ")
    assert (raw.shared.body_bytes, house.body_bytes) == (0, 0)
    raw.send(f.get(3))
    assert len(raw.requests()) == 1
