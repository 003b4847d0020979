"""How soon a token is counted, how soon an exchange is durable, and what both cost.

    python -m bench.metering                   a full run, JSON on stdout
    python -m bench.metering --quick --json out.json

visible_ms         a token is sampled in an engine's process -> another process has parsed its counter (a page in shared
                   memory, polled every 50 us); the writer is the kernels' host build, or numpy without a compiler
durable_ms         an exchange is settled -> its record is committed to the ledger (synchronous=FULL), 1,000 a second
baseline_ms        what it is compared with: a row inserted over TCP into PostgreSQL, synchronous commit, in the path of
                   the request, 1,000 a second over 10 connections; null without PostgreSQL or asyncpg
hot_path_overhead  CPU of the loop's thread for a request of a flood (128 tokens), with a ledger / without, less 1: what
                   table and ledger cost on the hot path, with what the ledger's thread on the same core takes from it
                   (caches, the interpreter's lock). Accounts are counted on both sides. Servers are started anew for
                   each round, and take turns in it: a server may cost a quarter more in one life than in another, and
                   a busy machine only ever adds, so the least of all turns counts. hot_path has the figures behind it,
                   medians over rounds (of the least turn of each), and both for the whole process, where most of the
                   ledger is its thread

Visible and durable are two figures: the first says when a budget or a dashboard knows, the second what a power cut
cannot take back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import mmap
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Process, emit, free_port, h2load, machine, say, versions
from evap.metering import build, layout, ledger, opened, recorder
from evap.metering.page import PageReader, format_page
from evap.metering.record import Record
from evap.metering.writer import CompiledMeter, Join, MeterWriter, NumpyMeter

SLOTS, ROWS = 1024, 64
RATE = 1000
POLL_S = 50e-6
FLOOD = ("-c", "10", "-m", "50")
TOKENS = 128


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * q))]
        for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }
    return {name: round(value, 4) for name, value in at.items()}


# Visible


@contextlib.contextmanager
def shared_page() -> Iterator[Path]:
    path = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()) / f"evap-bench-{os.getpid()}"
    path.write_bytes(bytes(-(-layout.page_bytes(SLOTS) // mmap.PAGESIZE) * mmap.PAGESIZE))
    try:
        yield path
    finally:
        path.unlink()


def engine(path: str, steps: int, library: str, pipe: Connection) -> None:
    """The other process: one token for each of ROWS slots, every 1 to 3 ms. The stamp is taken when it is sampled."""
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    format_page(memory, SLOTS, epoch_device_ns=time.monotonic_ns(), epoch_unix_ns=time.time_ns())
    meter: MeterWriter = CompiledMeter(Path(library), memory) if library else NumpyMeter(memory)
    meter.begin([Join(slot, 0, 10) for slot in range(ROWS)], time.monotonic_ns())
    slots, tokens = np.arange(ROWS, dtype=np.int32), np.ones((ROWS, 1), np.int32)
    pipe.send("ready")
    pipe.recv()
    rng = random.Random(1)
    for _ in range(steps):
        time.sleep(rng.uniform(0.001, 0.003))
        now_ns = time.monotonic_ns()
        meter.begin([], now_ns)
        meter.step(slots, tokens, None, now_ns)
    pipe.recv()


def visible(steps: int) -> dict[str, Any]:
    library = str(build.host_library()) if build.host_compiler() is not None else ""
    with shared_page() as path:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        child = multiprocessing.get_context("spawn").Process(target=engine, args=(str(path), steps, library, theirs))
        child.start()
        ours.recv()
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        reader = PageReader(memory)
        epoch_ns = int.from_bytes(memory[layout.WORD_EPOCH_DEVICE_NS * 8 :][:8], "little")
        ours.send("go")
        found = watch(reader, epoch_ns, steps)
        ours.send("done")
        child.join()
        reader.close()
        memory.close()
    return {**percentiles(found), "steps": len(found), "writer": "kernels, host build" if library else "numpy"}


def watch(reader: PageReader, epoch_ns: int, steps: int) -> list[float]:
    """ms from each stamp (resolution 1 us) to its parsed row."""
    found: list[float] = []
    last = 0
    while last < steps:
        step = reader.heartbeat()
        if step != last:
            row = reader.row(0)
            now_ns = time.monotonic_ns()
            if row is not None:
                found.append((now_ns - epoch_ns) / 1e6 - row.last_us / 1e3)
                last = step
        time.sleep(POLL_S)
    return found[10:]


# Durable


def record(number: int) -> Record:
    now_us = time.time_ns() // 1000
    return Record(
        f"chatcmpl-{os.getpid():08d}{number:016d}", "a-key", "", "a-model", now_us, now_us, now_us, now_us, 100, 0, 200,
        200, 200, 200, 200, 1, 200, "stop",
    )  # fmt: skip


def arrivals(seconds: float) -> Iterator[float]:
    """Times of RATE events a second, Poisson."""
    rng, at = random.Random(2), 0.0
    while (at := at + rng.expovariate(RATE)) < seconds:
        yield at


def durable(folder: Path, seconds: float) -> dict[str, Any]:
    put: list[int] = []
    taken: list[float] = []
    durable_at = itertools.count()

    def committed(count: int) -> None:
        now_ns = time.monotonic_ns()
        taken.extend((now_ns - put[next(durable_at)]) / 1e6 for _ in range(count))

    table = opened.OpenTable(folder / "open", 1, 8192)
    writer = recorder.Recorder(
        ledger.open_ledger(folder), table, folder / "spool", on_durable=committed, now_ns=time.monotonic_ns
    )
    writer.start()
    start = time.monotonic()
    for number, at in enumerate(arrivals(seconds)):
        wait = start + at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        made, entry = record(number), table.open(b"", (), whole=True)
        put.append(time.monotonic_ns())
        table.settle([entry], [made])
        writer.put([made], [entry])
    if not writer.close() or len(taken) != len(put):
        raise RuntimeError("the ledger did not keep up")
    return {**percentiles(taken), "exchanges": len(taken), "per_s": RATE}


# The baseline


def baseline(seconds: float) -> dict[str, Any] | None:
    """None where PostgreSQL or asyncpg is missing."""
    try:
        import asyncpg  # noqa: F401, PLC0415

        from tests.metering.postgres import database  # noqa: PLC0415 - the one place that knows how to start one
    except ImportError:
        return None
    with database(fsync=True) as postgres:
        if postgres is None:
            return None
        return asyncio.run(_insert(postgres.url, seconds))


async def _insert(url: str, seconds: float) -> dict[str, Any]:
    import asyncpg  # noqa: PLC0415

    pool = await asyncpg.create_pool(url, min_size=10, max_size=10)
    columns = ", ".join(f"{name} {'bigint' if isinstance(value, int) else 'text'}" for name, value in
                        zip(Record.__struct_fields__, tuple(_values(0)), strict=True))  # fmt: skip
    await pool.execute(f"CREATE TABLE billing ({columns.replace('end text', 'why text')}, PRIMARY KEY (id))")
    sql = f"INSERT INTO billing VALUES ({', '.join(f'${i + 1}' for i in range(len(Record.__struct_fields__)))})"
    taken: list[float] = []

    async def one(number: int) -> None:
        arrived = time.monotonic_ns()
        await pool.execute(sql, *_values(number))
        taken.append((time.monotonic_ns() - arrived) / 1e6)

    loop = asyncio.get_running_loop()
    tasks, start = [], loop.time()
    for number, at in enumerate(arrivals(seconds)):
        wait = start + at - loop.time()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(loop.create_task(one(number)))
    await asyncio.gather(*tasks)
    await pool.close()
    return {**percentiles(taken), "exchanges": len(taken), "per_s": RATE, "connections": 10}


def _values(number: int) -> list[Any]:
    made = record(number)
    return [getattr(made, name) for name in Record.__struct_fields__]


# The hot path


Turn = tuple[float, float]  #: us of CPU per request: the loop's thread, the process


def flood(folder: Path, rounds: int, turns: int, requests: int) -> dict[str, Any] | None:
    """With and without a ledger. None without h2load."""
    if shutil.which("h2load") is None:
        return None
    body = folder / "body.json"
    message = {"role": "user", "content": "What does a server cost per token that it streams?"}
    body.write_text(json.dumps({"messages": [message], "max_tokens": TOKENS, "stream": True, "ignore_eos": True}))
    load = [*FLOOD, "-d", str(body), "-H", "content-type: application/json"]
    runs: dict[str, list[list[Turn]]] = {"without": [], "with": []}
    for number in range(rounds):
        extras = {"without": [], "with": ["--data-dir", str(folder / f"data{number}")]}
        for name, its in flood_round(extras, load, turns, requests, swap=number % 2 == 1).items():
            runs[name].append(its)
    return compare(runs)


def flood_round(
    extras: dict[str, list[str]], load: list[str], turns: int, requests: int, *, swap: bool
) -> dict[str, list[Turn]]:
    """A server for each, and their turns after one to warm up."""
    command = [sys.executable, "-m", "evap", "serve", "--engine", "synthetic", "--synthetic-step-ms", "0",
               "--max-running", "512", "--log-level", "warning", "--port"]  # fmt: skip
    servers: dict[str, tuple[Process, int]] = {}
    found: dict[str, list[Turn]] = {name: [] for name in extras}
    try:
        for name, extra in sorted(extras.items(), reverse=swap):
            port = free_port()
            servers[name] = Process([*command, str(port), *extra]), port
            servers[name][0].wait_port(port)
        for turn in range(turns + 1):
            for name, (process, port) in servers.items():
                before = loop_ns(process.pid)
                done = h2load(process.pid, f"http://127.0.0.1:{port}/v1/chat/completions", load, requests=requests)
                if turn:
                    loop = loop_ns(process.pid) - before
                    found[name].append((loop / requests / 1e3, done.cpu_ns / requests / 1e3))
    finally:
        for process, _ in servers.values():
            process.stop()
    return found


def loop_ns(pid: int) -> int:
    """CPU time of the process's first thread, which is the loop's."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])


def compare(runs: dict[str, list[list[Turn]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column, part in enumerate(("loop", "process")):
        least = {name: [min(turn[column] for turn in turns) for turns in its] for name, its in runs.items()}
        before, after = least["without"], least["with"]
        found[part] = {
            "us_without": round(min(before), 2), "us_with": round(min(after), 2),
            "overhead": round(min(after) / min(before) - 1, 4),
            "median_us_without": round(statistics.median(before), 2),
            "median_us_with": round(statistics.median(after), 2),
            "median_overhead": round(statistics.median(after) / statistics.median(before) - 1, 4),
            "rounds": [[round(b, 1), round(a, 1)] for b, a in zip(before, after, strict=True)],
        }  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--json", metavar="FILE", default="-", help="where the document goes; - is stdout")
    given = parser.parse_args()
    seconds, steps, floods = (3.0, 1000, (4, 2, 2000)) if given.quick else (15.0, 5000, (10, 4, 4000))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "durable").mkdir()
        say("visible ...")
        seen = visible(steps)
        say("durable ...")
        kept = durable(folder / "durable", seconds)
        say("baseline ...")
        compared = baseline(seconds)
        say("hot path ...")
        hot = flood(folder, *floods)
    document = {
        "bench": "metering", "machine": machine(), "versions": versions("evap", "numpy", "asyncpg"),
        "visible_ms": seen, "durable_ms": kept, "baseline_ms": compared,
        "hot_path_overhead": hot["loop"]["overhead"] if hot else None, "hot_path": hot,
    }  # fmt: skip
    emit(document, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
