"""Do probes and other streams notice large prompts? `/health` and `/ready`, and the gaps between tokens of a stream.

    python -m bench.probes --quick --json -

A paced synthetic engine with 2,000 streams on 20 HTTP/2 connections; another process asks `/health` and `/ready` in
turn, one request each 5 ms on a kept connection; then the same while curl sends prompts of 30 MB one after the other,
over HTTP/1.1 and HTTP/2 in turn, each to be tokenized and answered with one token. `probe_ms`: from the request to its
answer. `itl_ms`: the gap between the tokens of a stream, for the streams of one connection; the engine's step is the
least it can be. `upload_s`: one large prompt from its first byte to its answer. Clients and server share the cores.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.latency import Client
from bench.measure import Process, emit, free_port, machine, say, versions

STREAMS, CONNECTIONS = 2000, 20
STEP_MS = 25.0
PROMPT_BYTES = 30 << 20
PROBE_EVERY_S = 0.005
PATHS = ("/health", "/ready")


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = lambda q: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3)  # noqa: E731
    return {"p50": at(0.5), "p99": at(0.99), "max": round(ordered[-1], 3), "samples": len(ordered)}


def probe(port: int, seconds: float) -> list[float]:
    """Milliseconds of each probe."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    times, end = [], time.monotonic() + seconds
    for path in itertools.cycle(PATHS):
        began = time.monotonic()
        if began >= end:
            return times
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        times.append((time.monotonic() - began) * 1e3)
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}")
        time.sleep(max(0.0, began + PROBE_EVERY_S - time.monotonic()))
    raise AssertionError


class Streams:
    """All streams; those of the first connection are looked at, the others' bytes are read and thrown away."""

    def __init__(self, port: int) -> None:
        tokens = 10**6
        self.clients = [Client(port, STREAMS // CONNECTIONS, tokens) for _ in range(CONNECTIONS)]
        self.selector = selectors.DefaultSelector()
        for number, client in enumerate(self.clients):
            client.read()  # the server's SETTINGS, which it acknowledges
            self.selector.register(client.sock, selectors.EVENT_READ, number)

    def run(self, until: Any) -> list[float]:
        """Read until `until()` is true; the gaps between tokens, in milliseconds."""
        first = self.clients[0]
        first.arrivals.clear()
        while not until():
            for key, _ in self.selector.select(0.1):
                if key.data == 0:
                    if not first.read():
                        raise RuntimeError("the streams ended early")
                elif not self.clients[key.data].sock.recv(1 << 20):
                    raise RuntimeError("the server closed a connection")
        return [(b - a) / 1e6 for times in first.arrivals.values() for a, b in itertools.pairwise(times)]


def watch(port: int, streams: Streams, seconds: float, uploads: Sequence[list[str]]) -> dict[str, Any]:
    """One phase: probes and streams for `seconds`, and for as long as the uploads take."""
    command = [sys.executable, "-m", "bench.probes", "--probe", str(port), "--seconds", str(seconds)]
    prober = subprocess.Popen(command, stdout=subprocess.PIPE)
    waiting, running, took = list(uploads), None, []
    began = time.monotonic()

    def done() -> bool:
        nonlocal running, began
        if running is not None and running.poll() is not None:
            if running.returncode:
                raise RuntimeError(f"an upload failed: {running.returncode}")
            took.append(time.monotonic() - began)
            running = None
        if running is None and waiting and prober.poll() is None:
            began, running = time.monotonic(), subprocess.Popen(waiting.pop(0), stdout=subprocess.DEVNULL)
        return running is None and prober.poll() is not None

    gaps = streams.run(done)
    assert prober.stdout is not None
    row: dict[str, Any] = {"probe_ms": spread(json.loads(prober.stdout.read())), "itl_ms": spread(gaps)}
    if took:
        row["uploads"], row["upload_s"] = len(took), spread(took)
    return row


def upload(port: int, body: Path, version: str) -> list[str]:
    return ["curl", "-sSf", version, "-H", "Expect:", "-H", "content-type: application/json", "--data-binary",
            f"@{body}", f"http://127.0.0.1:{port}/v1/completions"]  # fmt: skip


def measure(seconds: float, extra: Sequence[str]) -> list[dict[str, Any]]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        body = Path(folder) / "body.json"
        body.write_text(json.dumps({"prompt": "word " * (PROMPT_BYTES // 5), "max_tokens": 1}))
        process = Process([
            sys.executable, "-m", "evap", "serve", "--engine", "synthetic", "--port", str(port),
            "--synthetic-step-ms", str(STEP_MS), "--max-running", "4096", "--max-model-len", "10000000",
            "--log-level", "warning", "--drain-timeout", "0", *extra,
        ])  # fmt: skip
        try:
            process.wait_port(port)
            streams = Streams(port)
            streams.run(iter([False] * 40 + [True]).__next__)  # warm-up
            versions_used = ("--http1.1", "--http2-prior-knowledge")
            uploads = [upload(port, body, v) for v in itertools.islice(itertools.cycle(versions_used), 200)]
            rows = [
                {"name": "without", **watch(port, streams, seconds, [])},
                {"name": "with large prompts", **watch(port, streams, seconds, uploads)},
            ]
        finally:
            process.stop()
    for row in rows:
        say(f"{row['name']}: " + ", ".join(f"{k} {v}" for k, v in row.items() if k != "name"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 s a phase instead of 30")
    parser.add_argument("--seconds", type=float, help="of a phase")
    parser.add_argument("--probe", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", default="-", help="where the document goes; - is stdout")
    parser.add_argument("serve", nargs="*", help="after --: options for the server")
    given = parser.parse_args()
    seconds = given.seconds or (5.0 if given.quick else 30.0)
    if given.probe:
        json.dump(probe(given.probe, seconds), sys.stdout)
        return 0
    rows = measure(seconds, given.serve)
    emit({"bench": "probes", "machine": machine(), "versions": versions("evap", "h2", "uvloop"), "streams": STREAMS,
          "step_ms": STEP_MS, "prompt_bytes": PROMPT_BYTES, "rows": rows}, given.json)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
