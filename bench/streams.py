"""Times of tokens as a client sees them: streams arrive at a fixed rate, whatever the server does (open loop).

    echo '{"port": 8000, "path": "/v1/completions", "body": "...", "rate": 10, "seconds": 5}' | python -m bench.streams

One small HTTP/1.1 client for every server, so that what differs is the server: a process of its own, at a higher
priority where that is allowed, with connections that are kept (as SDKs do). The clock starts when a request is handed
to the kernel, and stops at the kernel's own time of arrival (SO_TIMESTAMPNS): a client that runs late does not count.

A machine that stands still does, and nobody can tell it from a slow server by one request. So the client also watches
itself: it wakes every TICK_MS, and where it came more than LATE_MS late, whatever was being measured then is
`disturbed`: kept apart and counted, for every server alike.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

NICE: Final = -5
TICK_MS: Final = 2.0
LATE_MS: Final = 10.0
#: A stream that is not over by then has failed.
PATIENCE_NS: Final = 60 * 10**9
_SO_TIMESTAMPNS: Final = 35  # asm-generic/socket.h; Python has no name for it
_TIMESPEC: Final = struct.Struct("qq")


@dataclass
class Times:
    """Milliseconds. ttft: from the request's last byte out to the first token in; itl: between tokens. *_disturbed:
    those during which this client was late. late_ms: by how much it started each request too late. itl is of the
    arrivals: tokens that came together share the time since the arrival before."""

    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    ttft_disturbed_ms: list[float] = field(default_factory=list)
    itl_disturbed_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    failed: int = 0
    nice: int = 0

    def add(self, other: Times) -> None:
        for name in ("ttft_ms", "itl_ms", "ttft_disturbed_ms", "itl_disturbed_ms", "late_ms"):
            getattr(self, name).extend(getattr(other, name))
        self.failed += other.failed
        self.nice = other.nice


def percentile(values: Sequence[float], share: float) -> float:
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Connection:
    """One that is kept: a request after the other."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 5)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.socket.setblocking(False)
        self.busy = False
        self.arrivals: list[tuple[int, int]] = []  # (when, tokens), nanoseconds since the epoch
        self._tail = b""

    def ask(self, request: bytes) -> None:
        self.busy, self._tail, self.arrivals = True, b"", []
        self.sent_ns = time.time_ns()
        self.socket.send(request)

    def read(self) -> bool:
        """True: the answer is complete. Raises ConnectionError."""
        data, extra, _, _ = self.socket.recvmsg(1 << 16, 64)
        now = time.time_ns()
        for level, kind, value in extra:
            if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                seconds, rest = _TIMESPEC.unpack(value)
                now = seconds * 10**9 + rest
        if not data:
            raise ConnectionResetError
        whole = self._tail + data
        cut = whole.rfind(b"\n\n") + 2 if b"\n\n" in whole else 0
        tokens = whole.count(b'"text":"', 0, cut) - whole.count(b'"text":""', 0, cut)
        if tokens:
            self.arrivals.append((now, tokens))
        self._tail = whole[cut:]
        self.busy = not whole.endswith(b"\r\n0\r\n\r\n")  # the last chunk
        return not self.busy


class _Client:
    def __init__(self, port: int, request: bytes) -> None:
        self._port, self._request = port, request
        self._selector = selectors.DefaultSelector()
        self._connections: list[_Connection] = []
        self._stalls: list[tuple[int, int]] = []  # when this client did not run, though it wanted to
        self._answers: list[tuple[int, list[tuple[int, int]]]] = []  # (sent, arrivals)
        self.times = Times()

    def run(self, rate: float, seconds: float) -> Times:
        start = time.time_ns() + 50_000_000
        due = [start + int(n * 1e9 / rate) for n in range(max(1, int(rate * seconds)))]
        number, before = 0, time.time_ns()
        while number < len(due) or any(c.busy for c in self._connections):
            left_ms = min(TICK_MS, (due[number] - time.time_ns()) / 1e6) if number < len(due) else TICK_MS
            for key, _ in self._selector.select(max(0.0, left_ms) / 1e3):
                self._read(key.data)
            now = time.time_ns()
            if now - before > (TICK_MS + LATE_MS) * 1e6:
                self._stalls.append((before, now))
            before = now
            if number < len(due) and now >= due[number]:
                self.times.late_ms.append((now - due[number]) / 1e6)
                self._ask()
                number += 1
            if now > due[-1] + PATIENCE_NS:
                self.times.failed += sum(c.busy for c in self._connections)
                break
        self._judge()
        return self.times

    def _ask(self) -> None:
        connection = next((c for c in self._connections if not c.busy), None)
        try:
            if connection is None:
                connection = _Connection(self._port)
                self._connections.append(connection)
                self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.ask(self._request)
        except OSError:
            self._lost(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            if connection.read():
                self._answers.append((connection.sent_ns, connection.arrivals))
        except BlockingIOError:
            return
        except OSError:
            self._lost(connection)

    def _lost(self, connection: _Connection | None) -> None:
        """One that is closed while it idles is no failure."""
        self.times.failed += connection is None or connection.busy
        if connection is not None:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def _judge(self) -> None:
        times = self.times
        for sent, arrivals in self._answers:
            if not arrivals:
                times.failed += 1
                continue
            before = arrivals[0][0]
            found = times.ttft_disturbed_ms if self._stalled(sent, before) else times.ttft_ms
            found.append((before - sent) / 1e6)
            for at, tokens in arrivals[1:]:
                found = times.itl_disturbed_ms if self._stalled(before, at) else times.itl_ms
                found.extend([(at - before) / 1e6 / tokens] * tokens)
                before = at

    def _stalled(self, begin: int, end: int) -> bool:
        return any(first < end and begin < last for first, last in self._stalls)


def paced(port: int, path: str, body: bytes, *, rate: float, seconds: float) -> Times:
    """`rate` requests a second for `seconds`, each streamed to its end, from a process of its own."""
    job = {"port": port, "path": path, "body": body.decode(), "rate": rate, "seconds": seconds}
    done = subprocess.run(
        [sys.executable, "-m", "bench.streams"], input=json.dumps(job), capture_output=True, text=True, check=True,
        timeout=seconds + 120,
    )  # fmt: skip
    return Times(**json.loads(done.stdout))


def summary(blocks: Iterable[Times]) -> dict[str, Any]:
    """Of one server's blocks. p50, p90: of all requests together; p99: the median over the blocks of each one's, and
    p99_pooled of all together. *_min, *_max: over the blocks."""
    blocks, whole = list(blocks), Times()
    for one in blocks:
        whole.add(one)
    found: dict[str, Any] = {"requests": len(whole.ttft_ms), "disturbed": len(whole.ttft_disturbed_ms)}
    for name, values, disturbed in (
        ("ttft_ms", whole.ttft_ms, whole.ttft_disturbed_ms), ("itl_ms", whole.itl_ms, whole.itl_disturbed_ms),
    ):  # fmt: skip
        found[f"{name}_p50"], found[f"{name}_p90"] = percentile(values, 0.5), percentile(values, 0.9)
        for share in (0.5, 0.99):
            each = [percentile(own, share) for one in blocks if (own := getattr(one, name))]
            key = f"{name}_p{share:.0%}".removesuffix("%")
            found[key] = percentile(each, 0.5) if share > 0.5 else found[key]
            found[f"{key}_min"], found[f"{key}_max"] = min(each, default=0.0), max(each, default=0.0)
        found[f"{name}_p99_pooled"] = percentile(values, 0.99)
        found[f"{name}_p99_with_disturbed"] = percentile([*values, *disturbed], 0.99)
    found["client_late_ms"] = max(whole.late_ms, default=0.0)
    found["client_late_ms_p50"] = percentile(whole.late_ms, 0.5)
    found["client_nice"] = whole.nice
    return found


def main() -> None:
    job = json.load(sys.stdin)
    with contextlib.suppress(PermissionError):
        os.nice(NICE)
    body = job["body"].encode()
    head = (
        f"POST {job['path']} HTTP/1.1\r\nhost: 127.0.0.1:{job['port']}\r\ncontent-type: application/json\r\n"
        f"accept: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    # The kernel stamps packets only while some socket wants it, and takes a while to begin.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as witness:
        witness.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        time.sleep(0.1)
        gc.disable()
        times = _Client(job["port"], head.encode() + body).run(job["rate"], job["seconds"])
    times.nice = os.nice(0)
    json.dump(asdict(times), sys.stdout)


if __name__ == "__main__":
    main()
