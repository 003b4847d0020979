"""kill -9 at random moments: the ledger has what the engine's own log says, each exchange once, to the token.

EVAP_TEST_CRASHES sets how often (4 if it is not set; 100 for a long evening).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from evap.metering import ledger
from evap.metering.record import Record
from tests.clients.asking import eventually
from tests.support import TIME_FACTOR, Server, running

CRASHES = int(os.environ.get("EVAP_TEST_CRASHES", "4"))
CLIENTS = 6
KINDS: tuple[dict[str, Any], ...] = (
    {"stream": True},
    {"stream": True, "n": 3},
    {"stream": True, "stop": ["never to be seen"]},
    {"stream": False},
    {"stream": True, "leave": True},
)


class Client(threading.Thread):
    """Asks again and again until the server is gone. received: exchange id -> tokens of text."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self._random = url, random.Random(seed)
        self.begun = 0  #: answers of which something was read
        self.received: Counter[str] = Counter()
        self.complete: dict[str, int] = {}
        self.left: set[str] = set()  #: those whose end this client did not wait for

    def run(self) -> None:
        client = httpx.Client(base_url=self._url, trust_env=False, timeout=30 * TIME_FACTOR)
        with client as http, contextlib.suppress(httpx.HTTPError):
            while True:
                self._ask(http)

    def _ask(self, http: httpx.Client) -> None:
        kind = dict(self._random.choice(KINDS))
        leave = kind.pop("leave", False)
        tokens = self._random.randint(1, 60)
        messages = [{"role": "user", "content": "canary:word please"}]
        body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, **kind}
        if not kind["stream"]:
            answer = http.post("/v1/chat/completions", json=body).json()
            self.complete[answer["id"]] = answer["usage"]["completion_tokens"]
            self.begun += 1
            return
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            id = ""
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.complete[id] = tokens * kind.get("n", 1)
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    self.begun += not id
                    id = event["id"]
                    text = "".join(c["delta"].get("content") or "" for c in event["choices"])
                    self.received[id] += len(text)  # the canary's tokens are one character each
                    if leave and self.received[id] > tokens // 2:
                        self.left.add(id)
                        return


def wait_for_a_moment(clients: list[Client], chance: random.Random) -> None:
    """A random one while answers are on their way, however slow the machine is: so many of them have begun."""
    begun = chance.randint(2, 3 * CLIENTS)
    eventually(lambda: sum(client.begun for client in clients) >= begun, "answers begin")
    threading.Event().wait(chance.uniform(0.0, 0.1))


def lives(folder: Path, log: Path, number: int, seed: int) -> list[Client]:
    """One life of a server, ended by kill -9 at a random moment."""
    flags = ("--engine", "synthetic", "--port", "0", "--synthetic-step-ms", "2", "--data-dir", str(folder))
    server = Server(*flags, module=("tests.metering.logged_server", str(log), "serve"))
    try:
        server.wait_ready()
        clients = [Client(server.url, seed * 1000 + number * CLIENTS + i) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        wait_for_a_moment(clients, random.Random(seed + number))
        # Stopped first, so that clients can read what was handed over: a kill may reset connections and lose the rest.
        server.process.send_signal(signal.SIGSTOP)
        seen = -1
        while seen != (seen := sum(client.received.total() for client in clients)):
            threading.Event().wait(0.2 * TIME_FACTOR)
    finally:
        server.kill()
    for client in clients:
        client.join(60 * TIME_FACTOR)
    server.check_log()
    return clients


def read_log(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Tokens by exchange, and those of the last line, which the loop may not have seen."""
    lines = path.read_text().splitlines() if path.exists() else []
    total: Counter[str] = Counter()
    for line in lines:
        total.update(json.loads(line))
    return total, Counter(json.loads(lines[-1])) if lines else Counter()


def check(record: Record, logged: int, last: int, received: int, complete: int | None) -> None:
    assert logged - last <= record.computed <= logged, record
    assert record.computed >= record.emitted >= record.delivered == record.billable, record
    if complete is not None:
        assert record.delivered == record.emitted == record.computed == complete, record
        assert record.end == "length"
    elif received >= 0 and record.end == "interrupted":
        # What was handed over in the very last step may have been counted and not sent, or sent and not counted.
        assert record.delivered - last <= received <= record.delivered + last, record


def test_the_ledger_is_what_the_engine_computed(tmp_path: Path) -> None:
    seed = int(os.environ.get("EVAP_TEST_SEED", random.randrange(1 << 20)))
    print(f"EVAP_TEST_SEED={seed}")  # noqa: T201 - shown when it fails
    folder = tmp_path / "data"
    received: Counter[str] = Counter()
    complete: dict[str, int] = {}
    left: set[str] = set()
    logged: Counter[str] = Counter()
    last: Counter[str] = Counter()
    for number in range(CRASHES):
        log = tmp_path / f"log-{number}"
        for client in lives(folder, log, number, seed):
            received += client.received
            complete |= client.complete
            left |= client.left
        total, final = read_log(log)
        logged += total
        last += final
    with running("--data-dir", str(folder)):
        pass  # it settles what the last one left
    with ledger.reading(folder) as db:
        records = {r.id: r for _, r in ledger.rows(db, ledger.Filter(), limit=1_000_000)}
        sums = ledger.sums(db, ledger.Filter(), ())[0]
    missing = {id for id in set(logged) - set(records) if logged[id] != last[id]}
    assert not missing, "every exchange that had a token is there (but for those of a batch that the loop did not see)"
    assert len(logged) > CRASHES
    for id, record in records.items():
        check(record, logged[id], last[id], -1 if id in left else received[id], complete.get(id))
    assert sums.computed == sum(r.computed for r in records.values())
    assert logged.total() - last.total() <= sums.computed <= logged.total()
    interrupted = [r for r in records.values() if r.end == "interrupted"]
    assert interrupted
    assert any(r.delivered for r in interrupted)
