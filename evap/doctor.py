"""`python -m evap doctor`: what `serve`, given the same options, would find on this machine.

Every check is one line: a mark, what it is about, what was found, and what to do when it is not good. torch is asked
in a process of its own: a broken build may crash, and it is imported nowhere else outside the embedded engine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evap import __version__
from evap.config import Config
from evap.engine import choose, model, model_builtin
from evap.errors import StartupError
from evap.options import Settings

OK: Final = "ok"
NOTE: Final = "note"  # something is not there that this configuration does not need
BAD: Final = "BAD"  # serve would fail

_ASK_TORCH: Final = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "gpus": names}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    mark: str
    about: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        tail = f"\n{'':18}try: {self.remedy}" if self.remedy else ""
        return f"{self.mark:5} {self.about:11} {self.found}{tail}"


def run(settings: Settings) -> int:
    """Print the report to stdout. Returns 0 when `serve` with these settings should start, else 1."""
    bad = 0
    for check in checks(settings):
        sys.stdout.write(f"{check}\n")
        sys.stdout.flush()
        bad += check.mark == BAD
    verdict = "serve should start" if not bad else f"serve will not start: {bad} to mend"
    sys.stdout.write(f"\n{verdict}\n")
    return 1 if bad else 0


def checks(settings: Settings) -> Iterator[Check]:
    """All checks, slow ones last, each made when it is asked for."""
    config = settings.config
    yield Check(
        OK, "evap", f"{__version__}, Python {platform.python_version()} ({sys.executable}), {platform.platform()}"
    )
    yield _libraries()
    yield Check(OK, "processors", f"{os.cpu_count()}, of which this process may use {len(os.sched_getaffinity(0))}")
    yield from (Check(OK, "option", f"{name} from {where}") for name, where in sorted(settings.origins.items()))
    yield _port(config)
    engine, check = _engine(config)
    yield check
    yield _model(config, engine)
    yield _disk()
    yield from _torch(engine, _ask_torch)
    yield _package("vllm", wanted=engine == "vllm")


def _libraries() -> Check:
    """The core dependencies without which nothing starts."""
    names = ("h2", "uvloop", "httptools", "msgspec", "numpy", "tokenizers")
    found: list[str] = []
    missing: list[str] = []
    for name in names:
        version = _version(name)
        (found if version else missing).append(f"{name} {version}" if version else name)
    if missing:
        return Check(BAD, "libraries", "missing: " + ", ".join(missing), "pip install evap")
    return Check(OK, "libraries", ", ".join(found))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _port(config: Config) -> Check:
    host, port = config.server.host, config.server.port
    if host == "none":
        return Check(OK, "address", f"unix:{config.server.uds}" if config.server.uds else "none but what is passed on")
    where = f"{host}:{port}"
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no obstacle
            probe.bind(family[4])
    except OSError as e:
        return Check(BAD, "address", f"{where}: {e.strerror}", "--port 0 picks a free one")
    return Check(OK, "address", f"{where} is free" if port else f"{host}, on a port that the system picks")


def _engine(config: Config) -> tuple[str, Check]:
    asked = config.engine.engine
    try:
        engine = choose.choose(asked)
    except StartupError as e:
        return "", Check(BAD, "engine", e.message, e.remedy)
    return engine, Check(OK, "engine", f"{engine} (--engine auto)" if asked == "auto" else engine)


def _model(config: Config, engine: str) -> Check:
    if engine == "synthetic":
        return Check(OK, "model", "none needed by the synthetic engine")
    name = config.engine.model or model.DEFAULT_MODEL
    if name in model_builtin.BUILTIN:
        if model_builtin.is_ready(name):
            return Check(OK, "model", f"{name} in {model_builtin.directory(name)}")
        return Check(NOTE, "model", f"{name} will be fetched at the first start", f"python -m evap model pull {name}")
    if os.path.isdir(name):
        try:
            model.check_directory(Path(name))
        except StartupError as e:
            return Check(BAD, "model", e.message, e.remedy)
        return Check(OK, "model", f"directory {name}")
    return Check(
        NOTE, "model", f"{name} comes from the Hugging Face hub or its cache", f"python -m evap model pull {name}"
    )


def _disk() -> Check:
    root = model.cache_root()
    there = next(path for path in (root, *root.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    found = f"{root}, {free / 1e9:.1f} GB free"
    if not os.access(there, os.W_OK):
        return Check(NOTE, "cache", f"{root} is not writable: models cannot be fetched", "set EVAP_CACHE_DIR")
    return Check(
        NOTE if free < 1e9 else OK, "cache", found, "free some space, or set EVAP_CACHE_DIR" if free < 1e9 else ""
    )


def _ask_torch() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120, check=False)


def _torch(engine: str, ask: Callable[[], subprocess.CompletedProcess[str]]) -> Iterator[Check]:
    wanted = engine == "torch"
    if not choose.installed("torch"):
        yield _package("torch", wanted=wanted)
        return
    try:
        answer = ask()
        facts = json.loads(answer.stdout)
    except subprocess.TimeoutExpired:
        yield Check(BAD if wanted else NOTE, "torch", "its import takes more than two minutes")
        return
    except ValueError:
        reason = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        yield Check(BAD if wanted else NOTE, "torch", f"does not start: {reason}", choose.NEEDS["torch"][1])
        return
    yield Check(OK, "torch", f"{facts['version']}, {facts['threads']} threads")
    gpus = facts["gpus"]
    yield Check(
        OK if gpus else NOTE, "CUDA", ", ".join(gpus) if gpus else "no device that torch can use: the CPU computes"
    )


def _package(name: str, *, wanted: bool) -> Check:
    version = _version(name)
    if version or not wanted:
        return Check(OK if version else NOTE, name, version or "not installed (and not needed)")
    return Check(BAD, name, "not installed", choose.NEEDS[name][1])
