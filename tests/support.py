"""A real evap server in a process of its own, for tests that speak to it over a socket."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
#: Machines that are slow or busy set this above 1; every time-out of the tests is multiplied by it.
TIME_FACTOR: Final = float(os.environ.get("EVAP_TEST_TIME_FACTOR", "1"))
START_TIMEOUT_S: Final = 60.0 * TIME_FACTOR
STOP_TIMEOUT_S: Final = 30.0 * TIME_FACTOR

_READY: Final = re.compile(r"ready at (?P<url>https?://\S+:(?P<port>\d+)) in ")


class Server:
    """`python -m evap serve ARGS`, or `module` in its place. `url` ends without a slash; `log`: stdout and stderr."""

    def __init__(
        self, *args: str, env: Mapping[str, str] | None = None, module: tuple[str, ...] = ("evap", "serve")
    ) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("EVAP_") or k == "EVAP_CACHE_DIR"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *module, *args],
            cwd=ROOT, env={**clean, "PYTHONUNBUFFERED": "1", **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", process_group=0,
        )  # fmt: skip
        self.url = ""
        self.port = 0
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line)
                if not self.url and (ready := _READY.search(line)):
                    self.url, self.port = ready["url"], int(ready["port"])
                self._changed.notify_all()
        with self._changed:
            self._lines.append("")  # the end: waiters look again
            self._changed.notify_all()

    @property
    def log(self) -> str:
        with self._changed:
            return "".join(self._lines)

    @property
    def host(self) -> str:
        return self.url.split("//", 1)[-1].rsplit(":", 1)[0].strip("[]")

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the banner is there. Raises AssertionError, with the log, when the process ends first."""
        with self._changed:
            self._changed.wait_for(lambda: self.url or self._ended(), timeout_s)
        assert self.url, f"the server did not start (exit code {self.process.poll()}):\n{self.log}"

    def wait_log(self, pattern: str, timeout_s: float = STOP_TIMEOUT_S) -> re.Match[str]:
        """The first match of `pattern` in the log, waiting for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._search(pattern) or self._ended(), timeout_s)
            found = self._search(pattern)
        assert found, f"{pattern!r} is not in the log:\n{self.log}"
        return found

    def _search(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, "".join(self._lines))

    def _ended(self) -> bool:
        return bool(self._lines) and self._lines[-1] == ""

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, and the exit code. Raises AssertionError (and kills it) when the server does not end in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server ignored SIGTERM for {timeout_s} s:\n{self.log}") from None
        self._reader.join(timeout_s)
        return code

    def kill(self) -> None:
        """End the process and what it started, whatever state they are in."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        if self.process.stdout:
            self.process.stdout.close()

    def check_log(self) -> None:
        """No exception may have escaped, in the server or in a library."""
        assert "Traceback (most recent call last)" not in self.log, self.log


@contextlib.contextmanager
def running(*args: str, engine: str = "synthetic", env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A ready server on a free loopback port, ended (and its log checked) at the end of the block."""
    server = Server("--engine", engine, "--port", "0", *args, env=env)
    try:
        server.wait_ready()
        yield server
        if server.process.poll() is None:
            assert server.stop() == 0, server.log
        server.check_log()
    finally:
        server.kill()
