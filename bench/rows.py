"""CPU of a step's rows in memory: streams of text, streams of token ids, and both at once.

    python -m bench.rows --json -

500 streams on 10 HTTP/2 connections, one token each a step, through the row table and the real wire core; nothing is
written to a socket. apart: both kinds in one step, but pushed one after the other, so that each throws the other's plan
away (what evap did before it had one plan for both). ns a token, CPU of the process; the kinds take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from bench.measure import Spread, emit, machine, say, versions
from evap.config import ProtocolConfig
from evap.protocol.connection import Http2Core
from evap.protocol.events import Reply, RequestReady
from evap.protocol.rows import RowTable

CONNECTIONS, STREAMS, TEXT = 10, 50, 24
PREFIX = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","model":"synthetic","created":1'
)
TAIL = b'},"finish_reason":null}]}\n\n'
VOCABULARY = 32_000


def replies() -> list[Reply]:
    """Running answers of real cores whose clients have opened their windows as far as they go."""
    found: list[Reply] = []
    for _ in range(CONNECTIONS):
        core, client = Http2Core(ProtocolConfig()), H2Connection(H2Configuration(client_side=True))
        client.initiate_connection()
        client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: (1 << 31) - 1})
        client.increment_flow_control_window((1 << 31) - 1 - 65_535)
        for sid in range(1, 2 * STREAMS, 2):
            head = {":method": "GET", ":scheme": "http", ":authority": "x", ":path": "/"}
            client.send_headers(sid, list(head.items()), end_stream=True)
        events = core.receive(client.data_to_send(), 1)
        while core.unread:
            events += core.receive(b"", 1)
        for event in events:
            if isinstance(event, RequestReady):
                event.reply.start(200, [])
                found.append(event.reply)
        core.take_output()
        core.written(0, 1)
    return found


def house(kind: str) -> Callable[[], None]:
    """One step of this kind."""
    answers = replies()
    table = RowTable(len(answers))
    tables = np.zeros(VOCABULARY, f"V{TEXT}"), np.arange(VOCABULARY, dtype="<u4").view("V4")
    raw = np.array([kind == "ids" or (kind in ("mixed", "apart") and n % 2 == 1) for n in range(len(answers))])
    for slot, reply in enumerate(answers):
        around = (b"", b"", 4, 1) if raw[slot] else (PREFIX, TAIL, TEXT, 0)
        assert table.join(slot, reply, *around)
    slots, tokens = np.arange(len(answers), dtype=np.int32), np.arange(len(answers), dtype=np.int32) % VOCABULARY
    halves = [(slots[part], tokens[part]) for part in ((raw, ~raw) if kind == "apart" else (np.ones_like(raw),))]
    cores = {id(reply.core): reply.core for reply in answers}.values()

    def step() -> None:
        for of, ids in halves:
            assert table.push(of, ids, tables, np.ones(len(of), np.bool_)).all()
        for core in cores:
            core.take_output()
            core.written(0, 1)

    return step


def measure(steps: int, repeat: int) -> list[dict[str, Any]]:
    kinds = {kind: house(kind) for kind in ("text", "ids", "mixed", "apart")}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeat):
        for kind, step in kinds.items():
            step()
            began = time.process_time_ns()
            for _ in range(steps):
                step()
            found[kind].append((time.process_time_ns() - began) / steps / CONNECTIONS / STREAMS)
    rows = []
    for kind, times in found.items():
        row: dict[str, Any] = {"name": kind}
        Spread.of(times).into(row, "ns_per_token", 1)
        say(f"{kind:6} {row['ns_per_token']:6.1f} ns a token ({row['ns_per_token_min']}-{row['ns_per_token_max']})")
        rows.append(row)
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--json", default="-", help="where to write the result; - is standard output")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    given = parser.parse_args(argv)
    rows = measure(200 if given.quick else 1000, 5 if given.quick else 15)
    emit({"bench": "rows", "machine": machine(), "versions": versions("numpy", "h2"), "rows": rows}, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
