"""A day's worth of clients in minutes: does anything leak, is every exchange settled once, does anything go wrong?

    python -m bench.soak                       200,000 exchanges
    python -m bench.soak --quick --json -      3,000

A real server with the synthetic engine and a ledger; clients over HTTP/2 and HTTP/1.1 that stream or not, ask for
several choices, use stop strings, reset at once, soon or at the first token, stall, read slowly, leave, abort, send
nonsense. Every answer that is read to its end is compared with what the engine must have said.

Then, with all clients gone: nothing is open (exchanges, generations, bodies, connections, descriptors, tasks), memory
has not grown in the second half, the ledger has each exchange once and as many as /metrics counts, its tokens are those
that the clients saw, and the log has no error. Exit code 1 if any of this is not so.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import uvloop

from bench.measure import CLIENT_CORE, Process, cpu_ns, descendants, emit, free_port, machine, say, versions
from bench.soak_asks import Tally
from bench.soak_clients import clients
from evap.metering.ledger import reading

COMMAND = (
    sys.executable, "-m", "evap", "serve", "--engine", "synthetic", "--port", "{port}", "--synthetic-step-ms", "1",
    "--max-running", "512", "--max-queued", "4096", "--data-dir", "{folder}", "--log-level", "warning",
    "--stall-timeout", "2", "--token-cache-mb", "1",
)  # fmt: skip
#: Connections at a time.
AT_ONCE = 48
#: Time for the last streams to be given up and settled.
CALM_S = 20.0
#: What memory may grow by in the second half: pools of the allocator, and the ids of the last 10,000 exchanges.
MOST_GROWTH_MB = 6.0
GAUGES = ("open_exchanges", "running", "waiting", "body_bytes")


class Server:
    def __init__(self, folder: Path, workers: int) -> None:
        self.port, self.folder = free_port(), folder
        command = [part.format(port=self.port, folder=folder) for part in COMMAND]
        self.process = Process([*command, "--workers", f"{workers}"])
        self.process.wait_port(self.port)

    def metrics(self) -> dict[str, float]:
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def settled(self) -> int:
        return int(sum(n for name, n in self.metrics().items() if name.startswith("evap_exchanges_total{")))

    def rss_mb(self) -> float:
        """Of all its processes; what they share is counted in each."""
        pages = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in descendants(self.process.pid))
        return sum(map(int, pages)) * 4096 / 1e6

    def descriptors(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in descendants(self.process.pid))

    def calm(self) -> dict[str, float]:
        """The gauges, once nothing runs any more, or when it took too long."""
        deadline = time.monotonic() + CALM_S
        while True:
            now = self.metrics()
            found = {name: now[f"evap_{name}"] for name in GAUGES}
            found["connections"] = now["evap_connections"] - 1  # this one
            if "evap_tasks" in now:
                found["tasks"] = now["evap_tasks"]
            if not any(found[name] for name in (*GAUGES, "connections")) or time.monotonic() > deadline:
                return found
            time.sleep(0.2)


def ledger(folder: Path, tally: Tally) -> tuple[int, list[str]]:
    """(its exchanges, what is wrong with those that a client has read to their end)."""
    with reading(folder) as db:
        rows = {i: (e, d, s) for i, e, d, s in db.execute("SELECT id, emitted, delivered, status FROM exchanges")}
        (count,) = db.execute("SELECT count(*) FROM exchanges").fetchone()
    wrong = []
    for identity, tokens in tally.tokens.items():
        emitted, delivered, status = rows.get(identity, (None, None, None))
        if emitted is None or status != 200 or delivered < tokens or delivered > emitted:
            wrong.append(f"{identity}: {tokens} tokens read, the record says {emitted}, {delivered}, {status}")
    return count, wrong


def verdict(
    server: Server, tally: Tally, rss: list[float], before: dict[str, float]
) -> tuple[dict[str, Any], list[str]]:
    """What is left over, and what of it is wrong."""
    time.sleep(1.0)
    calm, descriptors, settled = server.calm(), server.descriptors(), server.settled()
    deadline = time.monotonic() + CALM_S
    count, wrong = ledger(server.folder, tally)
    while count < settled and time.monotonic() < deadline:
        time.sleep(0.2)
        count, wrong = ledger(server.folder, tally)
    log = server.process.log.read_text()
    errors = [line for line in log.splitlines() if re.search(r"Traceback|Error|error|exception|Task was", line)]
    second_half = rss[len(rss) // 2 :] or [0.0]
    found = {
        **calm, "descriptors": descriptors, "descriptors_before": before["descriptors"],
        "tasks_before": before.get("tasks", 0.0), "exchanges_settled": settled, "exchanges_in_ledger": count,
        "answers_checked": len(tally.tokens), "rss_mb": [round(one, 1) for one in rss],
        "rss_growth_second_half_mb": round(second_half[-1] - second_half[0], 2), "log_errors": len(errors),
    }  # fmt: skip
    faults = [f"{name} is {calm[name]:.0f}" for name in (*GAUGES, "connections") if calm[name]]
    faults += [f"client: {fault}" for fault in tally.faults[:10]] + [f"ledger: {one}" for one in wrong[:10]]
    faults += [f"log: {line[:300]}" for line in errors[:10]]
    if count != settled:
        faults.append(f"the ledger has {count} exchanges, {settled} were settled")
    if descriptors > before["descriptors"] + 2:
        faults.append(f"{descriptors} descriptors, {before['descriptors']:.0f} before")
    if calm.get("tasks", 0.0) > before.get("tasks", 0.0) + 1:
        faults.append(f"{calm['tasks']:.0f} tasks, {before['tasks']:.0f} before")
    if found["rss_growth_second_half_mb"] > MOST_GROWTH_MB:
        faults.append(f"memory grew by {found['rss_growth_second_half_mb']} MB in the second half")
    return found, faults


def soak(server: Server, exchanges: int, seed: int) -> tuple[Tally, list[float]]:
    """(what the clients saw, memory of the server at each twentieth of the way)."""
    tally, rss = Tally(exchanges), [server.rss_mb()]

    def progress() -> None:
        if tally.asked >= exchanges * len(rss) / 20:
            rss.append(server.rss_mb())
            if len(rss) % 2 == 0:
                say(
                    f"{tally.asked:8} asked, {rss[-1]:7.1f} MB, {len(tally.tokens)} checked, {len(tally.faults)} faults"
                )

    uvloop.run(clients(server.port, tally, AT_ONCE, seed, progress))
    rss.append(server.rss_mb())
    return tally, rss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3,000 exchanges")
    parser.add_argument("--json", metavar="FILE", default="-", help="where the document goes; - is stdout")
    parser.add_argument("--exchanges", type=int, default=200_000, help="how many the clients ask for")
    parser.add_argument("--workers", type=int, default=1, help="processes of the server that share the port")
    parser.add_argument("--seed", type=int, default=1, help="of everything that the clients choose")
    given = parser.parse_args()
    exchanges = 3000 if given.quick else given.exchanges
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), given.workers)
        try:
            say(f"on core {CLIENT_CORE}: {exchanges} exchanges")
            soak(server, min(1000, exchanges // 3), given.seed + 1)  # warm-up: pools and caches have their size
            before = {"descriptors": float(server.descriptors()), **server.calm()}
            cpu, began = cpu_ns(server.process.pid), time.monotonic()
            tally, rss = soak(server, exchanges, given.seed)
            took, cpu = time.monotonic() - began, cpu_ns(server.process.pid) - cpu
            found, faults = verdict(server, tally, rss, before)
        finally:
            server.process.stop()
    document = {
        "bench": "soak", "machine": machine(), "versions": versions("evap", "h2", "uvloop"),
        "command": " ".join(COMMAND[1:]), "exchanges": tally.asked, "seconds": round(took, 1),
        "cpu_us_per_exchange": round(cpu / 1e3 / tally.asked, 1), "ended": dict(tally.ended.most_common()),
        "statuses": dict(tally.statuses), "after": found, "faults": faults,
    }  # fmt: skip
    emit(document, given.json)
    for fault in faults:
        say(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
