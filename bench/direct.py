"""What of an engine's tokens reaches its clients when 500 of them stream at once (a proxy in front may halve it).

    python -m bench.direct --quick --json -

There is no proxy here, so "direct" is the engine itself: it gives every stream a token each 20 ms, 25,000 a second, and
a step that comes more than 20 ms late is lost. share: tokens that the clients counted, of those. hypercorn streams the
same rate from a bare application, as a comparison; both servers run on one core, the clients on another.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bench.floods import SERVERS, STEP_MS, victim
from bench.measure import Spread, emit, machine, say, versions

CONNECTIONS, STREAMS = 10, 50
NOMINAL = CONNECTIONS * STREAMS * 1000.0 / STEP_MS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one second each")
    parser.add_argument("--json", metavar="FILE", default="-", help="where the document goes; - is stdout")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, interleaved")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each repetition")
    parser.add_argument("--servers", nargs="*", choices=list(SERVERS), default=list(SERVERS), help="only these")
    given = parser.parse_args()
    seconds, repeat = (1.0, 1) if given.quick else (given.seconds, given.repeat)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in given.servers}
    for _ in range(repeat):
        for name in given.servers:
            with victim(name, CONNECTIONS, STREAMS) as its:
                seen[name].append(its.window(seconds))
    rows: list[dict[str, Any]] = []
    for name, windows in seen.items():
        row: dict[str, Any] = {"name": name, "streams": CONNECTIONS * STREAMS, "nominal_tok_per_s": NOMINAL}
        Spread.of([one["tok_per_s"] / NOMINAL for one in windows]).into(row, "share")
        Spread.of([one["cpu"] for one in windows]).into(row, "cpu")
        Spread.of([one["silence_ms"] for one in windows]).into(row, "silence_ms", 1)
        rows.append(row)
        say(f"{name:11} {row['share']:.3f} of {NOMINAL:.0f} tokens/s, {row['cpu']:.2f} cores")
    emit(
        {
            "bench": "direct", "machine": machine(), "versions": versions("evap", "h2", "uvloop", "hypercorn"),
            "note": (__doc__ or "").split("\n\n")[-1].replace("\n", " "), "rows": rows,
        },
        given.json,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
