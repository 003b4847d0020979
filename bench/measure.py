"""What every bench shares: processes on given cores, their CPU time from the kernel, h2load, and statistics.

CPU is user + system time of all threads of a process and its children, from /proc/PID/task/*/schedstat (nanoseconds):
on a small machine throughput measures the client, CPU measures the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, CLIENT_CORE = CORES[0], CORES[-1]


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def into(self, row: dict[str, Any], key: str, digits: int = 3) -> None:
        row[key] = round(self.median, digits)
        row[f"{key}_min"], row[f"{key}_max"] = round(self.low, digits), round(self.high, digits)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def descendants(pid: int) -> Iterator[int]:
    """A process and all that it has started, by pid."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def cpu_ns(pid: int) -> int:
    """CPU time of a process, its threads and its children so far."""
    total = 0
    for one in descendants(pid):
        for task in Path(f"/proc/{one}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total


class Process:
    """A server under test, on its own core. `log`: where its output goes.

    It stays in our session. Linux shares cores among sessions first (autogroup); beside a session whose threads never
    sleep, as vLLM's workers while they have work, clients in another one came up to 300 ms late, in the same one 1 ms.
    """

    def __init__(
        self, command: Sequence[str], *, core: int | None = SERVER_CORE, env: dict[str, str] | None = None
    ) -> None:
        pin = ["taskset", "-c", str(core)] if core is not None and shutil.which("taskset") else []
        self.command = list(command)
        self.log = ROOT / "bench" / "out" / f"{Path(command[0]).name}-{os.getpid()}-{id(self):x}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*pin, *command], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})}, cwd=ROOT, process_group=0,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_port(self, port: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            time.sleep(0.05)
        raise RuntimeError(f"{' '.join(self.command)} did not listen on {port}:\n{self.log.read_text()[-3000:]}")

    def wait_log(self, text: str, timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if text in self.log.read_text(errors="replace"):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"{' '.join(self.command)} never said {text!r}:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


@dataclass(frozen=True)
class Load:
    """One h2load run against one server."""

    requests: int
    cpu_ns: int
    seconds: float


def h2load(pid: int, url: str, arguments: Sequence[str], *, requests: int, timeout_s: float = 120.0) -> Load:
    """Run h2load on the client core; RuntimeError unless every request succeeded."""
    pin = ["taskset", "-c", str(CLIENT_CORE)] if shutil.which("taskset") else []
    before = cpu_ns(pid)
    done = subprocess.run(
        [*pin, "h2load", "-n", str(requests), *arguments, url],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    after = cpu_ns(pid)
    finished = re.search(r"finished in ([\d.]+)(us|ms|s)", done.stdout)
    good = re.search(r"(\d+) succeeded, (\d+) failed", done.stdout)
    if finished is None or good is None or int(good[1]) != requests:
        raise RuntimeError(f"h2load {url}: not every request succeeded\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    seconds = float(finished[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[finished[2]]
    return Load(requests, after - before, seconds)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model[1] if model else platform.processor(), "cores": len(CORES), "kernel": platform.release(),
        "python": platform.python_version(),
    }  # fmt: skip


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def emit(document: dict[str, Any], target: str) -> None:
    """One JSON document to stdout ("-") or a file."""
    text = json.dumps(document, indent=1)
    if target == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(target).write_text(text + "\n")


def say(text: str) -> None:
    """Progress, on stderr: stdout is for the document."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
