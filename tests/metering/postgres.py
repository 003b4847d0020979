"""A real PostgreSQL of a test's own, on a free loopback port, which can be stopped, started and frozen."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support import TIME_FACTOR

WAIT_S = 30.0 * TIME_FACTOR


def binaries() -> Path | None:
    """Where initdb and postgres are; None when there is no PostgreSQL, or nobody whom it would run as."""
    places = [Path(p).resolve().parent for p in [shutil.which("initdb")] if p]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = next((p for p in places if (p / "initdb").exists() and (p / "postgres").exists()), None)
    return found if _user() is not None else None


def _user() -> dict[str, Any] | None:
    """PostgreSQL refuses to run as root: then it is its own user. Keywords for Popen; None: there is no such user."""
    if os.getuid() != 0:
        return {}
    try:
        who = pwd.getpwnam("postgres")
    except KeyError:
        return None
    return {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}


class Postgres:
    """fsync False: for tests, which do not pull plugs."""

    def __init__(self, bin: Path, folder: Path, *, fsync: bool = False) -> None:
        self._bin, self._folder, self._fsync = bin, folder, fsync
        self._process: subprocess.Popen[Any] | None = None
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = int(s.getsockname()[1])
        self.url = f"postgresql://evap@127.0.0.1:{self.port}/postgres"
        user = _user() or {}
        if user:
            os.chown(folder, user["user"], user["group"])
        self._call("initdb", "-D", str(folder / "data"), "-U", "evap", "-A", "trust", "-N", "-E", "UTF8", "--locale=C")

    def _call(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._bin / name, *arguments], cwd=self._folder, capture_output=True, text=True, check=False,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"}, **(_user() or {}),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        command = [
            str(self._bin / "postgres"), "-D", str(self._folder / "data"), "-p", str(self.port), "-h", "127.0.0.1",
            "-k", str(self._folder), "-c", f"fsync={'on' if self._fsync else 'off'}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=False,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"}, **(_user() or {}),
        )  # fmt: skip
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            done = subprocess.run(
                [self._bin / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)], check=False
            )
            if done.returncode == 0:
                return
            time.sleep(0.05)
        raise AssertionError("PostgreSQL did not start")

    def stop(self) -> None:
        """Immediately, as a crash would."""
        if self._process is not None:
            self.thaw()
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(WAIT_S)
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP for all of its processes: connections stay open, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        parent = psutil.Process(self._process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def query(self, sql: str) -> str:
        done = subprocess.run(
            [self._bin / "psql", "-XAtq", "-d", self.url, "-c", sql], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else f"error: {done.stderr.strip()}"


@contextlib.contextmanager
def database(*, fsync: bool = False) -> Iterator[Postgres | None]:
    """Started and empty; None when PostgreSQL is not installed."""
    bin = binaries()
    if bin is None:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="evap-pg-"))  # not below pytest's folders: those are closed to other users
    try:
        it = Postgres(bin, folder, fsync=fsync)
        try:
            it.start()
            yield it
        finally:
            it.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
