"""What the server adds between an engine step and a client: latency to the socket and to the client, and jitter.

    python -m bench.latency --quick --json -

A paced synthetic engine (a step every 10 ms); 64 streams on 1 and on 8 connections, 512 on 8; windows open.
`socket_us`: from the step's batch to the return of the last write of that step. `client_us`: to the moment a client
process has read a token. `jitter_us`: how much the gap between two tokens of a stream differs from the gap between
their engine steps.
Client and server share a clock (CLOCK_MONOTONIC) and, on a small machine, the cores.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import selectors
import socket
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.settings

from bench.measure import Process, emit, free_port, machine, say, versions

STEP_MS = 10.0
#: (streams, connections)
SHAPES = ((64, 1), (64, 8), (512, 8))


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and the greatest, in microseconds."""
    ordered = sorted(values)
    at = lambda q: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1)  # noqa: E731
    return {"p50": at(0.5), "p99": at(0.99), "max": round(ordered[-1], 1), "samples": len(ordered)}


class Client:
    """One connection: opens streams, then only notes when DATA frames of each stream were read."""

    def __init__(self, port: int, streams: int, tokens: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: (1 << 30)})
        self.h2.increment_flow_control_window(1 << 30)
        body = {
            "messages": [{"role": "user", "content": "time"}], "max_tokens": tokens, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        data = json.dumps(body).encode()
        for _ in range(streams):
            stream = self.h2.get_next_available_stream_id()
            fields = {":method": "POST", ":scheme": "http", ":authority": "x", ":path": "/v1/chat/completions"}
            fields |= {"content-type": "application/json", "content-length": str(len(data))}
            self.h2.send_headers(stream, list(fields.items()))
            self.h2.send_data(stream, data, end_stream=True)
        self.sock.sendall(self.h2.data_to_send())
        self.open = streams
        self.buffer = b""
        self.arrivals: dict[int, list[int]] = {}

    def read(self) -> bool:
        """True while streams are open. Frames are split by hand: h2 would be what is measured."""
        data = self.sock.recv(1 << 20)
        now = time.monotonic_ns()
        self.buffer += data
        at, end = 0, len(self.buffer)
        while end - at >= 9:
            length = int.from_bytes(self.buffer[at : at + 3], "big")
            if end - at < 9 + length:
                break
            kind, flags = self.buffer[at + 3], self.buffer[at + 4]
            stream = int.from_bytes(self.buffer[at + 5 : at + 9], "big")
            if kind == 0 and stream:
                if b'"content":"' in self.buffer[at + 9 : at + 9 + length]:
                    self.arrivals.setdefault(stream, []).append(now)
                self.open -= flags & 1
            elif kind == 4 and not flags & 1:
                self.sock.sendall(b"\0\0\0\x04\x01\0\0\0\0")  # SETTINGS ACK
            at += 9 + length
        self.buffer = self.buffer[at:]
        return bool(data) and self.open > 0


def drive(port: int, streams: int, connections: int, tokens: int) -> list[list[int]]:
    """Arrival times of each stream's tokens."""
    clients = [Client(port, streams // connections, tokens) for _ in range(connections)]
    selector = selectors.DefaultSelector()
    for client in clients:
        selector.register(client.sock, selectors.EVENT_READ, client)
    running = len(clients)
    while running:
        for key, _ in selector.select():
            if not key.data.read():
                selector.unregister(key.fileobj)
                running -= 1
    for client in clients:
        client.sock.close()
    return [times for client in clients for times in client.arrivals.values()]


def measure(streams: int, connections: int, tokens: int) -> dict[str, Any]:
    """One server, one run."""
    with tempfile.TemporaryDirectory() as folder:
        stamps, port = Path(folder) / "stamps", free_port()
        process = Process([
            sys.executable, "-m", "bench.peers.stamped_server", str(stamps),
            "--engine", "synthetic", "--port", str(port), "--synthetic-step-ms", str(STEP_MS),
            "--max-running", "1024", "--log-level", "warning",
        ])  # fmt: skip
        try:
            process.wait_port(port)
            drive(port, streams, connections, 20)  # warm-up
            began = time.monotonic_ns()
            arrivals = drive(port, streams, connections, tokens)
        finally:
            process.stop()
        raw = array("q")
        raw.frombytes(stamps.read_bytes())
    steps = [s for s in zip(raw[::3], raw[1::3], raw[2::3], strict=True) if s[0] >= began]
    starts = [s[0] for s in steps]
    settled = streams * 0.9  # steps in which (nearly) everybody has a token: not those that open or end streams
    row: dict[str, Any] = {"name": "evap", "streams": streams, "connections": connections, "tokens": tokens}
    row["socket_us"] = quantiles([(end - start) / 1e3 for start, end, n in steps if n >= settled])
    delays: list[float] = []
    jitter: list[float] = []
    for times in arrivals:
        late = [(t - starts[bisect.bisect_right(starts, t) - 1]) / 1e3 for t in times[2:-1] if t >= starts[0]]
        delays += late
        jitter += [abs(b - a) for a, b in itertools.pairwise(late)]
    row["client_us"], row["jitter_us"] = quantiles(delays), quantiles(jitter)
    figures = ", ".join(f"{key} {row[key]}" for key in ("socket_us", "client_us", "jitter_us"))
    say(f"{streams} streams on {connections}: {figures}")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 tokens a stream instead of 500")
    parser.add_argument("--json", metavar="FILE", default="-", help="where the document goes; - is stdout")
    given = parser.parse_args()
    tokens = 100 if given.quick else 500
    rows = [measure(streams, connections, tokens) for streams, connections in SHAPES]
    emit({"bench": "latency", "machine": machine(), "versions": versions("evap", "h2", "uvloop"), "step_ms": STEP_MS,
          "rows": rows}, given.json)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
