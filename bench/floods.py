"""What nine honest connections notice of a flood: evap beside a stock hypercorn, in one run.

    python -m bench.floods --quick --json -        one repetition, under 60 s
    python -m bench.floods --json out.json         three, interleaved

Nine connections with four streams each take a token every 20 ms; then one attacker at a time (bench/attacks.py) sends
10,000 frames or requests a second, on a new connection whenever its last one was closed. Both servers run on one core,
all clients on another. hypercorn streams ready bytes; evap validates, renders, tokenizes and accounts.
loss: share of the honest token rate that goes while the attack runs. silence_ms: longest time an honest connection got
nothing. submits: requests that reached the engine (the application). rss_mb: growth over the attack.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.attacks import ATTACKS, attacker
from bench.honest import honest
from bench.measure import CLIENT_CORE, Process, cpu_ns, descendants, emit, free_port, machine, say, versions

CONNECTIONS, STREAMS, STEP_MS = 9, 4, 20.0
#: After an attack: its streams are cancelled, and the allocator has settled.
CALM_S = 0.5
SERVERS = {
    "evap": (
        sys.executable, "-m", "evap", "serve", "--engine", "synthetic", "--port", "{port}", "--synthetic-step-ms",
        f"{STEP_MS}", "--max-running", "1024", "--max-queued", "4096", "--log-level", "error",
    ),
    "hypercorn": (
        sys.executable, "-m", "hypercorn", "bench.peers.counted_app:app", "-b", "127.0.0.1:{port}", "-k", "uvloop",
        "--log-level", "critical",
    ),
}  # fmt: skip
QUICK = [name for name in ATTACKS if name not in ("rapid-reset-whole", "ping-unread")]
fork = multiprocessing.get_context("fork")


@dataclass
class Victim:
    """A server and the honest connections to it."""

    name: str
    process: Process
    port: int
    totals: Any
    stop: Any = field(default_factory=fork.Event)

    def submits(self) -> int:
        path = "/metrics" if self.name == "evap" else "/count"
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as page:
            text = page.read().decode()
        if self.name != "evap":
            return int(text)
        return int(
            sum(float(n) for n in re.findall(r"^evap_(?:exchanges_total\{.*\}|open_exchanges) (\S+)$", text, re.M))
        )

    def rss_mb(self) -> float:
        pages = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in descendants(self.process.pid))
        return sum(map(int, pages)) * 4096 / 1e6

    def window(self, seconds: float) -> dict[str, float]:
        """Honest tokens per second, share of a core, longest silence."""
        self.totals[1] = 0.0
        tokens, cpu, began = self.totals[0], cpu_ns(self.process.pid), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        return {
            "tok_per_s": (self.totals[0] - tokens) / took,
            "cpu": (cpu_ns(self.process.pid) - cpu) / 1e9 / took,
            "silence_ms": self.totals[1] * 1e3,
        }


@contextlib.contextmanager
def victim(name: str, connections: int = CONNECTIONS, streams: int = STREAMS) -> Iterator[Victim]:
    port = free_port()
    process = Process([part.format(port=port) for part in SERVERS[name]], env={"STEP_MS": f"{STEP_MS}"})
    its = Victim(name, process, port, fork.Array("d", 3, lock=False))
    client = fork.Process(target=honest, args=(port, connections, streams, CLIENT_CORE, its.totals, its.stop))
    try:
        process.wait_port(port)
        client.start()
        while its.totals[0] < connections * streams * 10:
            if not client.is_alive():
                raise RuntimeError(f"the honest clients of {name} ended")
            time.sleep(0.05)
        yield its
    finally:
        its.stop.set()
        if client.pid:
            client.join(10)
        process.stop()


def flood(its: Victim, attack: str, seconds: float) -> dict[str, Any]:
    """One attack: honest rate before and during it, and what it cost."""
    before = its.window(seconds)
    rss, submits, lost = its.rss_mb(), its.submits(), its.totals[2]
    stop, (ours, theirs) = fork.Event(), fork.Pipe(duplex=False)
    process = fork.Process(target=attacker, args=(attack, its.port, CLIENT_CORE, stop, theirs))
    process.start()
    theirs.close()
    try:
        time.sleep(0.2)  # made and connected
        during = its.window(seconds)
    finally:
        stop.set()
    toll = ours.recv()
    process.join(10)
    ours.close()
    time.sleep(CALM_S)
    return {
        "before": before, "during": during, "toll": toll, "submits": its.submits() - submits,
        "rss_mb": its.rss_mb() - rss, "lost": its.totals[2] - lost,
    }  # fmt: skip


def row(name: str, attack: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the repetitions; the worst loss beside its median."""
    losses = [100.0 * (1 - run["during"]["tok_per_s"] / max(run["before"]["tok_per_s"], 1e-9)) for run in runs]
    ended: dict[str, int] = {}
    for run in runs:
        for how, count in run["toll"]["ended"].items():
            ended[how] = ended.get(how, 0) + count
    median = lambda values: round(statistics.median(list(values)), 2)  # noqa: E731
    out = {
        "name": name, "attack": attack,
        "tok_per_s_before": median(run["before"]["tok_per_s"] for run in runs),
        "tok_per_s_during": median(run["during"]["tok_per_s"] for run in runs),
        "loss_percent": median(losses), "loss_percent_max": round(max(losses), 2),
        "cpu_before": median(run["before"]["cpu"] for run in runs),
        "cpu_during": median(run["during"]["cpu"] for run in runs),
        "silence_ms": median(run["during"]["silence_ms"] for run in runs),
        "rss_mb": median(run["rss_mb"] for run in runs), "rss_mb_max": round(max(run["rss_mb"] for run in runs), 2),
        "submits": median(run["submits"] for run in runs),
        "honest_connections_lost": int(sum(run["lost"] for run in runs)),
        "units_sent": median(run["toll"]["units_sent"] for run in runs),
        "attacker_connections": median(run["toll"]["connections"] for run in runs), "attacker_ended": ended,
    }  # fmt: skip
    say(
        f"{attack:18}{name:11} loss {out['loss_percent']:6.1f} % (worst {out['loss_percent_max']:.1f})"
        f"  cpu {out['cpu_before']:.2f} -> {out['cpu_during']:.2f}  silence {out['silence_ms']:7.1f} ms"
        f"  rss {out['rss_mb_max']:+7.1f} MB  submits {out['submits']:7.0f}  sent {out['units_sent']:.0f}  {ended}"
    )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repetition of 0.4 s each, eight attacks")
    parser.add_argument("--json", metavar="FILE", default="-", help="where the document goes; - is stdout")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, interleaved")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each attack, and of honest traffic before it")
    parser.add_argument("--attacks", nargs="*", choices=list(ATTACKS), help="only these")
    parser.add_argument("--servers", nargs="*", choices=list(SERVERS), default=list(SERVERS), help="only these")
    given = parser.parse_args()
    attacks = given.attacks or (QUICK if given.quick else list(ATTACKS))
    seconds, repeat = (0.4, 1) if given.quick else (given.seconds, given.repeat)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(repeat):
        for name in given.servers:
            for attack in attacks:
                with victim(name) as its:  # a new one each time: hypercorn still works on the last flood
                    runs.setdefault((name, attack), []).append(flood(its, attack, seconds))
    rows = [row(name, attack, runs[name, attack]) for attack in attacks for name in given.servers]
    emit(
        {
            "bench": "floods", "machine": machine(), "versions": versions("evap", "h2", "uvloop", "hypercorn"),
            "commands": {name: " ".join(command[1:]) for name, command in SERVERS.items()},
            "note": (__doc__ or "").split("\n\n")[-1].replace("\n", " "), "rows": rows,
        },
        given.json,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
