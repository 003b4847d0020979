"""What tests of `--workers N` ask of a server, over connections of their own, so that any process may get it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from evap.metering import keys, ledger
from evap.metering.record import Record
from tests.clients.asking import chat, eventually
from tests.support import STOP_TIMEOUT_S, Server

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
TOKEN = re.compile(rb'"content":"[^"]')
StartServer = Callable[..., Server]


def ask(server: Server, word: str, tokens: int, key: str = "", **more: Any) -> httpx.Response:
    """Over a connection of its own, so that any process may get it."""
    headers = JSON | ({"authorization": f"Bearer {key}"} if key else {}) | more.pop("headers", {})
    return httpx.post(
        server.url + CHAT, headers=headers, content=chat(word, tokens, **more), timeout=STOP_TIMEOUT_S, trust_env=False
    )


def numbers(server: Server, key: str = "") -> dict[str, float]:
    """/metrics: name with labels -> value."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    text = httpx.get(server.url + "/metrics", timeout=STOP_TIMEOUT_S, trust_env=False, headers=headers).text
    return {name: float(value) for name, value in re.findall(r"^(evap_\S+) (\S+)$", text, re.M)}


def ready(server: Server) -> bool:
    """Whether the process that got the question has a way to the engine."""
    return httpx.get(server.url + "/ready", trust_env=False, timeout=STOP_TIMEOUT_S).status_code == 200


def children(server: Server, module: str) -> list[psutil.Process]:
    """Those that run a module."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it is ending
            if module in child.cmdline():
                found.append(child)
    return found


def loops(server: Server) -> list[psutil.Process]:
    """The loop processes."""
    return children(server, "evap.loop_process")


def records(folder: Path) -> list[Record]:
    with ledger.reading(folder) as db:
        return [record for _, record in ledger.rows(db, ledger.Filter(), limit=100_000)]


def key_file(folder: Path, **rights: Any) -> tuple[str, str]:
    """(path, secret of alice)."""
    path = folder / "keys.toml"
    return str(path), keys.create(path, "alice", rights)


def usage(server: Server, id: str) -> Any:
    answer = httpx.get(f"{server.url}/v1/usage/{id}", trust_env=False, timeout=STOP_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streams(server: Server, count: int, tokens: int, key: str = "", **more: Any) -> Iterator[Any]:
    """So many streams at once, each over its own connection; yields when all have a token (what has
    come of each until then), then what became of each."""
    begun: list[str] = []

    def one(n: int) -> bytes:
        parts: list[bytes] = []
        has_token = False
        headers = JSON | ({"authorization": f"Bearer {key}"} if key else {})
        with httpx.Client(trust_env=False, timeout=STOP_TIMEOUT_S) as client:
            try:
                content = chat(f"s{n}", tokens, **more)
                with client.stream("POST", server.url + CHAT, headers=headers, content=content) as s:
                    for part in s.iter_bytes():
                        parts.append(part)
                        if not has_token and (has_token := TOKEN.search(b"".join(parts)) is not None):
                            begun.append(b"".join(parts).decode(errors="replace"))
            except httpx.HTTPError:
                parts.append(b"|broken")
        return b"".join(parts)

    with ThreadPoolExecutor(count) as pool:
        running_ones = [pool.submit(one, n) for n in range(count)]
        eventually(lambda: len(begun) == count, "all streams have begun", STOP_TIMEOUT_S)
        yield begun
        yield [answer.result() for answer in running_ones]
