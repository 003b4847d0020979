"""Does everything agree to the token? A scripted run of mixed exchanges, with an engine and a server that are killed.

    python -m bench.reconcile                     2,000 exchanges on a real engine (torch, a tiny random Llama)
    python -m bench.reconcile --quick             200 of them
    python -m bench.reconcile --engine synthetic

Complete, reset early and late, stop strings, stop tokens, three choices, whole answers, budgets that run out; the
engine's process killed once (SIGKILL), the server killed once (kill -9) with everything running, and started again.
Then the ledger, `/metrics`, the trailers, the usage events, the engine's own counters page and what the client has
counted for itself, character by character, must be the same numbers. One difference is an error, and ends the run.

The client is HTTP/2 from scratch (tests/metering/wire_client.py): it counts every DATA frame, also after a reset. Every
token of both models is one character.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import emit, machine, say, versions
from bench.mixture import Run, script, synthetic, torch
from evap.metering import counters, ledger
from evap.metering.page import PageReader, map_page_file
from evap.metering.record import Record
from tests.metering.wire_client import Stream, WireClient
from tests.support import Server

FIELDS = ("prompt", "cached", "computed", "emitted", "delivered")


def metrics(server: Server, key: str) -> dict[str, int]:
    request = urllib.request.Request(server.url + "/metrics", headers={"authorization": f"Bearer {key}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        text = answer.read().decode()
    found = {m[1]: int(float(m[2])) for m in re.finditer(r'evap_tokens_total\{kind="(\w+)"\} (\S+)', text)}
    waiting = re.findall(r"^evap_(?:open_exchanges|ledger_pending) (\S+)", text, re.MULTILINE)
    assert len(waiting) == 2
    found["waiting"] = sum(int(float(value)) for value in waiting)
    mismatches = re.findall(r"^evap_meter_mismatches_total (\S+)", text, re.MULTILINE)
    found["mismatches"] = sum(int(float(value)) for value in mismatches)
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


def engine_says(folder: Path) -> int | None:
    """Tokens that the engine has sampled in this life of the server, by its own page; None if it has none."""
    found = None
    for path in counters.files(folder):
        memory = map_page_file(path)[0]
        reader = PageReader(memory)
        line = reader.step_line()
        found = (found or 0) + (line.computed if line is not None else 0)
        reader.close()
        memory.close()
    return found


def check(stream: Stream, record: Record) -> None:
    """One exchange, as the client saw it and as the ledger has it."""
    assert record.computed >= record.emitted >= record.delivered, record
    if stream.kind == "whole":
        usage = json.loads(stream.body)["usage"]
        assert usage["completion_tokens"] == record.emitted == record.delivered == record.computed
        return
    if stream.reset:
        assert record.end in ("client_abort", "length"), "its end may have come before the reset"
        assert record.delivered == stream.chars, (stream.kind, stream.chars, record)
        return
    expected = {"early": "client_abort", "late": "client_abort", "budget": "budget"}
    ends = ("stop", "length") if stream.kind in ("stop", "token") else (expected.get(stream.kind, "length"),)
    assert record.end in ends, (stream.kind, record)
    assert record.delivered == record.emitted == counted(stream), (stream, record)
    assert record.computed == record.emitted or stream.kind == "stop", record
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == record.emitted
    assert stream.usage["prompt_tokens"] == record.prompt
    assert stream.trailers["evap-usage-end"] == record.end
    assert stream.trailers["evap-usage-id"] == record.id
    trailers = {name: int(stream.trailers[f"evap-usage-{name}"]) for name in FIELDS}
    assert trailers == {name: getattr(record, name) for name in FIELDS}


def counted(stream: Stream) -> int:
    """Tokens as the client counts them: characters, and what stopped the answer, which is not text."""
    if stream.kind == "token" and stream.reason == "stop":
        return stream.chars + 1
    return stream.chars + len(stream.stopped)


def all_agree(run: Run, server: Server, client: WireClient, streams: list[Stream], before: int) -> None:
    """All of these are over; in this life of the server there were no others but the first `before` of the ledger."""
    client.run(lambda: client.open == 0)
    found = quiet(server, run.key, client)
    rows = records(run.folder)
    by_id = of(rows)
    assert sums(rows[before:]) == {name: found[name] for name in FIELDS}
    assert found["mismatches"] == 0, server.log
    sampled = engine_says(run.folder)
    assert sampled is None or sampled == found["computed"], "the engine's own count"
    for stream in streams:
        assert stream.status == 200, stream.body
        record = by_id(stream)
        assert record is not None
        if stream.kind in ("forever", "harm") and record.end == "engine_failed":
            assert record.delivered == stream.chars
        else:
            check(stream, record)


def of(rows: list[Record]) -> Callable[[Stream], Record | None]:
    by_id = {r.id: r for r in rows}
    assert len(by_id) == len(rows), "one record each"
    return lambda stream: by_id.get(json.loads(stream.body)["id"] if stream.kind == "whole" else stream.id)


def kill_engine(run: Run, server: Server, client: WireClient) -> None:
    """While ten generations run."""
    for _ in range(10):
        run.ask(client, "forever")
    if run.in_process:
        run.ask(client, "harm")
        return
    client.run(lambda: all(s.chars > 20 for s in run.seen[-10:]))
    children = subprocess.run(
        ["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip
    os.kill(int(children[0]), signal.SIGKILL)


def first_life(run: Run, server: Server) -> list[Stream]:
    """Every kind; an engine that dies; then a kill -9 in the middle of the last of them, which are returned."""
    first, second = run.exchanges * 2 // 5, run.exchanges // 5
    client = run.phase(server, script(first, run.random))
    all_agree(run, server, client, run.seen, 0)
    assert len(records(run.folder)) == first
    kill_engine(run, server, client)
    all_agree(run, server, client, run.seen[first:], 0)
    assert sum(r.end == "engine_failed" for r in records(run.folder)) >= 10
    client.close()
    server.wait_log("started again" if run.in_process else r"(?s)killed by SIGKILL.*, context ")
    client = run.phase(server, ["forever"] * 20 + script(second, run.random))
    killed = run.seen[-20 - second :]
    client.run(lambda: all(s.chars > 50 for s in killed[:20]))
    # Stopped first, so that the client can read what was sent: a kill resets the connection and loses the rest of it.
    os.kill(server.process.pid, signal.SIGSTOP)
    client.settle()
    server.kill()
    client.close()
    return killed


def killed_agree(run: Run, killed: list[Stream], sampled: int | None) -> None:
    """What the next start has settled is what the clients had received, and what the engine had sampled."""
    rows = records(run.folder)
    find = of(rows)
    ends: Counter[str] = Counter()
    if sampled is not None:
        assert sums(rows)["computed"] == sampled, "the engine's own count"
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
            most = 3 if stream.kind == "three" else 1
            assert abs(record.delivered - counted(stream)) <= most, (stream, record)
    assert ends["interrupted"] >= 20


def reconcile(run: Run) -> dict[str, Any]:
    """The whole run. Raises AssertionError at the first thing that differs; returns what was counted."""
    last = run.exchanges * 2 // 5
    server = run.start()
    try:
        killed = first_life(run, server)
        server.check_log()
    finally:
        server.kill()
    sampled = engine_says(run.folder)
    server = run.start()
    try:
        killed_agree(run, killed, sampled)
        before = len(records(run.folder))
        client = run.phase(server, script(last, run.random))
        all_agree(run, server, client, run.seen[-last:], before)
        client.close()
        assert server.stop() == 0
        rows = records(run.folder)
        assert len(rows) == before + last
        server.check_log()
    finally:
        server.kill()
    return {"exchanges": len(rows), "ends": dict(Counter(r.end for r in rows)), "tokens": sums(rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 exchanges instead of 2,000")
    parser.add_argument("--engine", choices=("torch", "synthetic"), default="torch")
    parser.add_argument("--json", metavar="FILE", default="-", help="where the document goes; - is stdout")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="evap-reconcile-"))
    started = time.monotonic()
    try:
        engine = synthetic() if given.engine == "synthetic" else torch(folder / "model")
        found = reconcile(Run(folder, engine, 200 if given.quick else 2000))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"{found['exchanges']} exchanges agree")
    document = {
        "bench": "reconcile", "machine": machine(), "versions": versions("evap", "torch"), "engine": given.engine,
        "agree": True, "seconds": round(time.monotonic() - started, 1), **found,
    }  # fmt: skip
    emit(document, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
