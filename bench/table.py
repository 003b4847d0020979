"""Markdown for the pages from a document of bench.frontend or bench.floods: python -m bench.table FILE.json"""

from __future__ import annotations

import json
import sys
from typing import Any

SHAPES = {
    "flood-10x50": "10 connections x 50 streams, as fast as it goes",
    "paced-4x25": "4 x 25, a token every 10 ms",
    "256x1": "256 connections x 1 stream",
    "256x1-coalesced": "the same with --coalesce-ms 10",
    "one-token": "answers of one token, 10 x 50",
    "small-window": "10 x 50, windows of 65,535 bytes",
    "tls-10x50": "10 x 50 over TLS",
    "h1-500x1": "HTTP/1.1, 500 connections",
}


def cell(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.2f} ({row[f'{key}_min']:.2f}-{row[f'{key}_max']:.2f})"


def floods(document: dict[str, Any]) -> list[str]:
    """Both servers of an attack in one line: median loss, and the worst."""
    names = list(dict.fromkeys(row["name"] for row in document["rows"]))
    heads = [f"{name}: honest tokens lost, % | CPU, cores | requests to the engine" for name in names]
    out = [f"| attack | {' | '.join(heads)} |", f"| --- |{' ---: |' * 3 * len(names)}"]
    for attack in dict.fromkeys(row["attack"] for row in document["rows"]):
        cells = []
        for row in (r for r in document["rows"] if r["attack"] == attack):
            loss = f"{max(0.0, row['loss_percent']):.1f} ({max(0.0, row['loss_percent_max']):.1f})"
            cpu = f"{row['cpu_before']:.2f} to {row['cpu_during']:.2f}"
            cells.append(f"{loss} | {cpu} | {row['submits']:.0f}")
        out.append(f"| {attack} | {' | '.join(cells)} |")
    return out


def frontend(document: dict[str, Any]) -> list[str]:
    out = [
        "| load | server | us of CPU per token | us per request | marginal us per token |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        slope = cell(row, "marginal_us_per_token") if "marginal_us_per_token" in row else ""
        us = f"{row['us_per_request']:.0f} ({row['us_per_request_min']:.0f}-{row['us_per_request_max']:.0f})"
        out.append(f"| {SHAPES[row['shape']]} | {row['name']} | {cell(row, 'us_per_token')} | {us} | {slope} |")
    return out


def main() -> int:
    with open(sys.argv[1]) as file:
        document = json.load(file)
    make = {"floods": floods, "frontend": frontend}[document["bench"]]
    sys.stdout.write("\n".join(make(document)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
