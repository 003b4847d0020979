"""What the clients ask for and what must come back; programs that may be missing; the server's gauges."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import TIME_FACTOR, Server

HERE: Final = Path(__file__).parent
#: For what should take milliseconds, and would take minutes if it were not noticed.
SOON_S: Final = 10.0 * TIME_FACTOR
PACKAGES: Final = {
    "curl": "curl",
    "nghttp": "nghttp2-client",
    "h2load": "nghttp2-client",
    "node": "nodejs",
    "java": "default-jdk-headless",
}


def program(name: str) -> str:
    """Its path. Skips the test, and says how to install it, where it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install {PACKAGES[name]}")
    return path


def run(*command: str, timeout_s: float = 60.0 * TIME_FACTOR, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The finished program; a failure shows what it said."""
    done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, **options)
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]!r}"
    return done


def node(script: str, *args: str) -> Any:
    """The JSON that a script of this folder prints."""
    return json.loads(run(program("node"), str(HERE / script), *args).stdout)


def chat(word: str, tokens: int, *, stream: bool = True, **more: Any) -> bytes:
    """A request whose answer is `said(word, tokens)`."""
    messages = [{"role": "user", "content": f"canary:{word} please"}]
    return json.dumps({"messages": messages, "max_tokens": tokens, "stream": stream, **more}).encode()


def said(word: str, tokens: int) -> str:
    """The synthetic engine repeats a canary, one byte a token."""
    return (f"{word} " * (tokens // (len(word) + 1) + 1))[:tokens]


def text_of(events: bytes) -> str:
    """The text of a complete stream of chat chunks."""
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n\n") if line and not line.startswith(b":")]
    assert lines[-1] == b"[DONE]", events[-300:]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1])


def gauge(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=SOON_S) as page:
        found = re.search(rf"^{name} (\S+)$", page.read().decode(), re.M)
    assert found, f"no {name} in /metrics"
    return float(found[1])


def eventually(check: Callable[[], object], what: str | Callable[[], object], timeout_s: float = SOON_S) -> float:
    """Seconds until `check` held. Fails after the time-out, with `what` or what it returns."""
    began = time.monotonic()
    while not check():
        late = time.monotonic() >= began + timeout_s
        assert not late, f"not within {timeout_s} s: {what() if callable(what) else what}"
        time.sleep(0.005)
    return time.monotonic() - began


def running(server: Server, count: int) -> Callable[[], bool]:
    return lambda: gauge(server, "evap_running") == count
