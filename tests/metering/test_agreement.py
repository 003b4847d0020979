"""A scripted run of mixed exchanges: ledger, /metrics, trailers, usage events and the client's own counts agree.

EVAP_TEST_EXCHANGES sets how many (240 if it is not set).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evap.metering import keys, ledger
from evap.metering.record import Record
from tests.metering.wire_client import Stream, WireClient
from tests.support import Server

EXCHANGES = int(os.environ.get("EVAP_TEST_EXCHANGES", "240"))
FIELDS = ("prompt", "cached", "computed", "emitted", "delivered")
AT_ONCE = 40
#: Tokens of an answer with a stop string: "wor" as text, and the string's own four with the end of the answer.
STOPPED = 7


class Run:
    """A client with a script, over as many lives of the server as it takes."""

    def __init__(self, folder: Path) -> None:
        self.random = random.Random(7)
        self.folder = folder / "data"
        file = folder / "keys.toml"
        self.key = keys.create(file, "rich", {})
        self.poor = [keys.create(file, f"poor-{i}", {"tokens_per_day": 60}) for i in range(EXCHANGES // 10)]
        self.flags = ("--engine", "synthetic", "synthetic-faults", "--port", "0", "--synthetic-step-ms", "1",
                      "--reset-burst", "100000", "--control-burst", "100000",
                      "--data-dir", str(self.folder), "--api-keys", str(file))  # fmt: skip
        self.seen: list[Stream] = []

    def start(self) -> Server:
        server = Server(*self.flags)
        server.wait_ready()
        return server

    def ask(self, client: WireClient, kind: str) -> None:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "canary:word please"}], "stream": True, "ignore_eos": True,
            "max_tokens": self.random.randint(20, 60), "stream_options": {"include_usage": True},
        }  # fmt: skip
        stream, key = Stream(kind), self.key
        if kind == "early":
            stream.on_event = lambda s: s.chars >= 1
        elif kind == "late":
            most = body["max_tokens"]
            stream.on_event = lambda s: s.chars >= most - 5
        elif kind == "stop":
            body["stop"] = ["d wo"]
        elif kind == "three":
            body["n"] = 3
        elif kind == "budget":
            key, body["max_tokens"] = self.poor.pop(), 5000
        elif kind == "whole":
            body["stream"] = False
            del body["stream_options"]
        elif kind == "forever":
            body["max_tokens"] = 100_000
        elif kind == "harm":
            body["messages"][0]["content"] += " fault:fail"
        self.seen.append(stream)
        client.ask(stream, body, key)

    def phase(self, server: Server, kinds: list[str]) -> WireClient:
        client = WireClient(server.port)
        for kind in kinds:
            client.run(lambda: client.open < AT_ONCE)
            self.ask(client, kind)
        return client


def script(count: int, random_: random.Random) -> list[str]:
    kinds = ["complete", "complete", "early", "late", "stop", "three", "whole"]
    found = [random_.choice(kinds) for _ in range(count)]
    for number in range(0, count, 20):
        found[number] = "budget"
    return found


def metrics(server: Server, key: str) -> dict[str, int]:
    request = urllib.request.Request(server.url + "/metrics", headers={"authorization": f"Bearer {key}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        text = answer.read().decode()
    found = {m[1]: int(float(m[2])) for m in re.finditer(r'evap_tokens_total\{kind="(\w+)"\} (\S+)', text)}
    waiting = re.findall(r"^evap_(?:open_exchanges|ledger_pending) (\S+)", text, re.MULTILINE)
    assert len(waiting) == 2
    found["waiting"] = sum(int(float(value)) for value in waiting)
    return found


def quiet(server: Server, key: str, client: WireClient) -> dict[str, int]:
    """Metrics once nothing is open any more, and everything that was sent has been read."""
    while (found := metrics(server, key))["waiting"]:
        client.ping()
    client.ping()
    return found


def records(folder: Path) -> list[Record]:
    with ledger.reading(folder) as db:
        return [r for _, r in ledger.rows(db, ledger.Filter(), limit=1_000_000)]


def sums(rows: list[Record]) -> dict[str, int]:
    return {name: sum(getattr(r, name) for r in rows) for name in FIELDS}


def check(stream: Stream, record: Record) -> None:
    """One exchange, as the client saw it and as the ledger has it."""
    if stream.kind == "whole":
        usage = json.loads(stream.body)["usage"]
        assert usage["completion_tokens"] == record.emitted == record.delivered == record.computed
        return
    expected = {"early": "client_abort", "late": "client_abort", "stop": "stop", "budget": "budget"}
    if stream.reset:
        assert record.end in ("client_abort", "length"), "its end may have come before the reset"
        assert record.delivered == stream.chars, stream.kind
        return
    assert record.end == expected.get(stream.kind, "length")
    if stream.kind == "stop":
        assert stream.chars == 3
        assert record.delivered == record.emitted == STOPPED
    else:
        assert record.delivered == record.emitted == record.computed == stream.chars
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == record.emitted
    assert stream.usage["prompt_tokens"] == record.prompt
    trailers = {name: int(stream.trailers[f"evap-usage-{name}"]) for name in FIELDS}
    assert stream.trailers["evap-usage-end"] == record.end
    assert stream.trailers["evap-usage-id"] == record.id
    counted = {name: getattr(record, name) for name in FIELDS}
    if stream.kind == "stop":  # the engine may go on until it hears of the stop, after the trailers have gone
        assert trailers.pop("computed") <= counted.pop("computed")
    assert trailers == counted


def of(rows: list[Record]) -> Callable[[Stream], Record | None]:
    by_id = {r.id: r for r in rows}
    assert len(by_id) == len(rows), "one record each"
    return lambda stream: by_id.get(json.loads(stream.body)["id"] if stream.kind == "whole" else stream.id)


def all_agree(run: Run, server: Server, client: WireClient, streams: list[Stream], before: int) -> None:
    """All of these are over; in this life of the server there were no others but the first `before` of the ledger."""
    client.run(lambda: client.open == 0)
    counted = quiet(server, run.key, client)
    rows = records(run.folder)
    find = of(rows)
    assert sums(rows[before:]) == {name: counted[name] for name in FIELDS}
    for stream in streams:
        assert stream.status == 200
        record = find(stream)
        assert record is not None
        if stream.kind in ("forever", "harm"):
            assert (record.end, record.delivered) == ("engine_failed", stream.chars)
        else:
            check(stream, record)


def life_with_everything(run: Run, server: Server) -> list[Stream]:
    """Every kind; an engine that dies; then a kill -9 in the middle of the last of them, which are returned."""
    third = EXCHANGES // 3
    client = run.phase(server, script(third, run.random))
    all_agree(run, server, client, run.seen, 0)
    assert len(records(run.folder)) == third
    for kind in ["forever"] * 10 + ["harm"]:
        run.ask(client, kind)
    all_agree(run, server, client, run.seen[-11:], 0)
    assert len(records(run.folder)) == third + 11
    client.close()
    server.wait_log("started again")
    client = run.phase(server, ["forever"] * 20 + script(third // 2, run.random))
    killed = run.seen[-20 - third // 2 :]
    client.run(lambda: all(s.chars > 50 for s in killed[:20]))
    # Stopped first, so that the client can read what was sent: a kill resets the connection and loses the rest of it.
    os.kill(server.process.pid, signal.SIGSTOP)
    client.settle()
    server.kill()
    client.close()
    return killed


def killed_agree(run: Run, killed: list[Stream]) -> None:
    """What the next start has settled is what the clients had received."""
    find = of(records(run.folder))
    ends: Counter[str] = Counter()
    for stream in killed:
        if not stream.id and not (stream.kind == "whole" and stream.ended):
            continue  # its client has seen nothing
        record = find(stream)
        assert record is not None
        ends[record.end] += 1
        if record.end != "interrupted":
            check(stream, record)
        else:
            # The last step may have been counted and not sent, or sent and not counted.
            seen = STOPPED if stream.kind == "stop" and stream.ended else stream.chars
            assert abs(record.delivered - seen) <= (3 if stream.kind == "three" else 1), record
    assert ends["interrupted"] >= 20


@pytest.mark.timeout(600)
def test_everything_agrees_to_the_token(tmp_path: Path) -> None:
    run, third = Run(tmp_path), EXCHANGES // 3
    server = run.start()
    try:
        killed = life_with_everything(run, server)
        server.check_log()
    finally:
        server.kill()
    server = run.start()
    try:
        killed_agree(run, killed)
        before = len(records(run.folder))
        client = run.phase(server, script(third, run.random))
        all_agree(run, server, client, run.seen[-third:], before)
        client.close()
        assert server.stop() == 0
        assert len(records(run.folder)) == before + third
        server.check_log()
    finally:
        server.kill()
