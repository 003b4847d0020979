"""Times of tokens as a client sees them: streams arrive at a fixed rate, whatever the server does (open loop).

One small HTTP/1.1 client for every server, so that what differs is the server. Each request is due at its own moment
and its clock starts there, also when the client is late: a slow server cannot slow the measurement down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: A client that starts a request later than this was not running: the machine had other things to do.
MOST_LATE_MS = 250.0


@dataclass
class Times:
    """Milliseconds. ttft: due moment to first token; itl: between reads that carried tokens, per token.

    late_ms: the most by which this client itself started a request too late; what was measured then is the client.
    """

    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    failed: int = 0
    late_ms: float = 0.0


def percentile(values: Sequence[float], share: float) -> float:
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Stream(asyncio.Protocol):
    """One request on one connection; counts `data: {` events with text and notes when they came."""

    def __init__(self, request: bytes, due: float, times: Times, done: asyncio.Future[None]) -> None:
        self._request, self._due, self._times, self._done = request, due, times, done
        self._last = 0.0
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        whole = self._tail + data
        events = whole.count(b'"content":"') - whole.count(b'"content":""') + whole.count(b'"text":"')
        cut = whole.rfind(b"\n\n") + 2
        self._tail = whole[cut:] if cut > 1 else whole
        if cut > 1 and events:
            tail_events = self._tail.count(b'"content":"') + self._tail.count(b'"text":"')
            events = max(1, events - tail_events)
            if self._last:
                self._times.itl_ms.extend([(now - self._last) * 1e3 / events] * events)
            else:
                self._times.ttft_ms.append((now - self._due) * 1e3)
            self._last = now
        if b"data: [DONE]" in whole:
            self._transport.close()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._times.failed += 1
            self._end()

    def _end(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def _one(host: str, port: int, request: bytes, due: float, times: Times) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    times.late_ms = max(times.late_ms, (time.perf_counter() - due) * 1e3)
    done: asyncio.Future[None] = loop.create_future()
    try:
        await loop.create_connection(lambda: _Stream(request, due, times, done), host, port)
        await asyncio.wait_for(done, 60)
    except (OSError, TimeoutError):
        times.failed += 1


async def _paced(port: int, path: str, body: bytes, rate: float, seconds: float) -> Times:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"accept: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    times = Times()
    start = time.perf_counter() + 0.1
    count = max(1, int(rate * seconds))
    jobs = [_one("127.0.0.1", port, head.encode() + body, start + n / rate, times) for n in range(count)]
    await asyncio.gather(*jobs)
    return times


def paced(port: int, path: str, body: bytes, *, rate: float, seconds: float, attempts: int = 3) -> Times:
    """`rate` requests a second for `seconds`, each streamed to its end. Measured again if this client came too late."""
    for _ in range(attempts):
        times = asyncio.run(_paced(port, path, body, rate, seconds))
        if times.late_ms < MOST_LATE_MS:
            break
    return times
