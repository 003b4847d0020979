"""What more loop processes give: `--workers` 1, 2, 4 over the same load, interleaved.

    python -m bench.workers --quick --json -        one repetition, under a minute
    python -m bench.workers --json out.json         three

h2load opens CONNECTIONS connections with STREAMS streams each; server and client share all cores, as on a small
machine: where there are no more cores than loop processes and clients, more processes cannot be much faster, and this
shows what they cost. Requests and tokens per second, and CPU of the whole process tree per request. Engine: synthetic,
as fast as it goes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.measure import CORES, Process, emit, free_port, h2load, machine, say, versions

CONNECTIONS, STREAMS = 16, 8
#: shape -> (tokens an answer, requests)
SHAPES = {"one-token": (1, 6000), "128-tokens": (128, 3000)}


def command(workers: int, port: int) -> list[str]:
    flags = ["--port", str(port), "--workers", str(workers), "--synthetic-step-ms", "0", "--log-level", "error"]
    limits = ["--max-running", "1024", "--max-queued", "4096"]
    return [sys.executable, "-m", "evap", "serve", "--engine", "synthetic", *flags, *limits]


def measure(workers: int, shape: str, folder: Path) -> dict[str, float]:
    """One run against a fresh server."""
    tokens, requests = SHAPES[shape]
    body = folder / f"{shape}.json"
    messages = [{"role": "user", "content": "canary:workers please"}]
    body.write_text(json.dumps({"messages": messages, "max_tokens": tokens, "stream": True, "ignore_eos": True}))
    port = free_port()
    process = Process(command(workers, port), core=None)
    try:
        process.wait_log("ready at", 60)
        load = [
            "-c",
            str(CONNECTIONS),
            "-m",
            str(STREAMS),
            "-t",
            "1",
            "-d",
            str(body),
            "-H",
            "content-type: application/json",
        ]
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        h2load(process.pid, url, load, requests=requests // 10)
        done = h2load(process.pid, url, load, requests=requests)
    finally:
        process.stop()
    return {
        "requests_per_s": done.requests / done.seconds, "tokens_per_s": done.requests * tokens / done.seconds,
        "us_per_request": done.cpu_ns / done.requests / 1e3,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="-", help="file for the document, - for stdout")
    parser.add_argument("--quick", action="store_true", help="one repetition, 1 and 2 processes")
    given = parser.parse_args()
    if shutil.which("h2load") is None:
        parser.error("h2load is not installed: apt install nghttp2-client")
    counts, repetitions = ((1, 2), 1) if given.quick else ((1, 2, 4), 3)
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(repetitions):
            for shape in SHAPES:
                for workers in counts:
                    run = measure(workers, shape, Path(name))
                    say(f"{shape:12} {workers} workers: " + ", ".join(f"{v:,.0f} {k}" for k, v in run.items()))
                    found.setdefault((workers, shape), []).append(run)
    rows: list[dict[str, Any]] = []
    for (workers, shape), runs in found.items():
        row: dict[str, Any] = {"name": "evap", "workers": workers, "shape": shape}
        for key in runs[0]:
            values = [run[key] for run in runs]
            row |= {key: round(statistics.median(values), 1), f"{key}_min": round(min(values), 1),
                    f"{key}_max": round(max(values), 1)}  # fmt: skip
        rows.append(row)
    document = {
        "bench": "workers",
        "machine": machine(),
        "versions": versions("h2", "uvloop", "numpy"),
        "cores": len(CORES),
    }
    emit({**document, "connections": CONNECTIONS, "streams": STREAMS, "rows": rows}, given.json)


if __name__ == "__main__":
    main()
