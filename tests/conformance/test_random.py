"""Case 61: random frames against the real protocol class."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from evap.config import ProtocolConfig
from evap.protocol.events import Event, RequestReady
from evap.protocol.transport import Hub
from tests.conformance.cases import case
from tests.protocol import frames as f
from tests.protocol.fake_transport import FakeTransport

KINDS = st.sampled_from([*range(10), f.ALTSVC, f.ORIGIN, f.PRIORITY_UPDATE, 0xFF])
IDS = st.sampled_from([0, 1, 2, 3, 5, 7, 0x7FFFFFFF])
PAYLOADS = st.one_of(
    st.binary(max_size=24),
    st.sampled_from([f.block(f.GET), f.block(f.POST), f.block(((b"x", b"y"),)), (1).to_bytes(4), bytes(8), bytes(300)]),
)
RANDOM = st.builds(f.frame, KINDS, st.integers(0, 255), IDS, PAYLOADS)
SENSIBLE = st.builds(
    lambda make, sid: make(sid),
    st.sampled_from(
        [f.get, f.post, f.headers, f.rst, lambda s: f.data(s, b"x"), lambda s: f.data(s, b"", end=True),
         lambda s: f.window(s, 70_000), lambda _: f.window(0, 1 << 20), lambda _: f.settings((4, 1000)),
         lambda _: f.settings((4, 1 << 20)), lambda _: f.ping(), lambda s: f.priority_update(s, b"u=1"),
         lambda _: f.goaway()]
    ),
    st.sampled_from([1, 3, 5, 7, 9]),
)  # fmt: skip


def hub(loop: asyncio.AbstractEventLoop) -> Hub:
    """Answers every request in one of several ways."""

    def on_event(event: Event) -> None:
        if isinstance(event, RequestReady):
            assert isinstance(event.body, bytes)
            turn = len(event.body) % 3
            if turn == 0:
                event.reply.whole(200, [], bytes(70_000))
            elif turn == 1:
                event.reply.start(200, [])
                event.reply.send(b"and no end")
            else:
                event.reply.abort()

    return Hub(ProtocolConfig(), on_event=on_event, loop=loop)


def drive(frames: list[bytes]) -> FakeTransport:
    """One connection's life; the loop's exception handler must never be called."""
    loop = asyncio.new_event_loop()
    errors: list[object] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    its = hub(loop)
    protocol = its.protocol()
    transport = FakeTransport(protocol)
    protocol.connection_made(transport)
    for frame in frames:
        if transport.is_closing():
            break
        protocol.data_received(frame)
    protocol.connection_lost(None)
    assert (its.shared.connections, its.shared.body_bytes) == (0, 0)
    its.close()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert errors == []
    assert not transport.aborted
    return transport


@case(61, "RFC 9113 5.4")
@given(st.lists(st.one_of(RANDOM, SENSIBLE, SENSIBLE), max_size=25))
@settings(max_examples=300)
def test_random_frames(frames: list[bytes]) -> None:
    drive([f.hello(), *frames])


@case(61, "RFC 9113 5.4")
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes(data: bytes, greeted: bool) -> None:
    drive([f.hello() if greeted else b"", data])


@case(61, "RFC 9113 10.5")
def test_memory_is_flat() -> None:
    def some() -> None:
        for sid in (1, 3, 5):
            drive([f.hello(), f.post(sid), f.headers(sid + 2), f.data(sid + 2, bytes(500)), f.frame(0xFF, 1, sid)])

    some()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(20):
        some()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 64 << 10
