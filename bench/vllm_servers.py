"""The servers of bench.vllm_frontends: each with its own engine core of the same model, and the bare loop over one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measure import Process, descendants, free_port, versions

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
