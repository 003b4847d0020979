"""`python -m evap usage`: the ledger as a table, CSV, JSON lines or Parquet; with prices, what it costs."""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from evap.errors import StartupError
from evap.metering import ledger, prices
from evap.metering.record import COLUMNS

FORMATS: Final = ("table", "csv", "jsonl", "parquet")
GROUPS: Final = (*ledger.GROUPS, "exchange")
_EPOCH: Final = datetime.date(1970, 1, 1)
_SHOWN: Final = ("id", "key", "model", "prompt", "cached", "computed", "emitted", "delivered", "billable", "end")

Row = dict[str, Any]


def run(given: argparse.Namespace) -> None:
    """The command, with its arguments read. Raises StartupError."""
    if not given.data_dir:
        raise StartupError("which ledger?", remedy="--data-dir DIR, as given to serve")
    groups = tuple(name for name in given.group_by.split(",") if name)
    if bad := [name for name in groups if name not in GROUPS]:
        raise StartupError(f"--group-by: {bad[0]!r} is none of {', '.join(GROUPS)}", remedy="--group-by day,model")
    if "exchange" in groups and len(groups) > 1:
        raise StartupError("--group-by exchange stands alone", remedy="--group-by exchange")
    chosen = ledger.Filter(
        first_day=day_of(given.first) if given.first else None, last_day=day_of(given.last) if given.last else None,
        model=given.model, key=given.key,
    )  # fmt: skip
    price_list = Path(given.prices) if given.prices else None
    rows = read(Path(given.data_dir), group_by=groups, chosen=chosen, price_list=price_list)
    write(rows, given.format, given.output)


def day_of(text: str) -> int:
    """Days since 1970 of an ISO date. Raises StartupError."""
    try:
        return (datetime.date.fromisoformat(text) - _EPOCH).days
    except ValueError:
        raise StartupError(f"{text!r} is not a date", remedy="2026-01-31 (days are UTC)") from None


def read(
    folder: Path, *, group_by: Sequence[str], chosen: ledger.Filter, price_list: Path | None = None
) -> Iterator[Row]:
    """Sums by group, or with group_by ("exchange",) every exchange, in the order of settling. Raises StartupError."""
    costs = prices.read(price_list) if price_list is not None else None
    with ledger.reading(folder) as db:
        if tuple(group_by) == ("exchange",):
            yield from _exchanges(db, chosen, costs)
            return
        # A cost needs the model: it is summed over models where they are not asked for.
        fine = ledger.sums(db, chosen, (*group_by, "model"))
        totals: dict[tuple[Any, ...], Row] = {}
        for usage in fine:
            names = [name for name in ledger.GROUPS if name in group_by]
            row = totals.setdefault(tuple(getattr(usage, n) for n in names), {n: getattr(usage, n) for n in names})
            for name in ledger.SUMS:
                row[name] = row.get(name, 0) + getattr(usage, name)
            _add_cost(row, costs, usage.model or "", usage.paid_prompt, usage.paid_cached, usage.billable)
    for row in totals.values():
        if "day" in row:
            row["day"] = (_EPOCH + datetime.timedelta(days=row["day"])).isoformat()
        yield row | ({"cost": prices.plain(row["cost"])} if costs is not None and row.get("cost") is not None else {})


def _exchanges(db: Any, chosen: ledger.Filter, costs: prices.Prices | None) -> Iterator[Row]:
    after = 0
    while found := ledger.rows(db, chosen, after=after):
        for seq, record in found:
            row: Row = {"seq": seq} | {name: getattr(record, name) for name in COLUMNS}
            paid = 1 if record.computed else 0
            _add_cost(row, costs, record.model, paid * record.prompt, paid * record.cached, record.billable)
            yield row | ({"cost": prices.plain(row["cost"])} if row.get("cost") is not None else {})
        after = found[-1][0]


def _add_cost(row: Row, costs: prices.Prices | None, model: str, prompt: int, cached: int, completion: int) -> None:
    """A sum over a model without a price has no cost: None, and not a number that is too small."""
    if costs is None:
        return
    cost = costs.cost(model, prompt=prompt, cached=cached, completion=completion)
    before = row.get("cost", 0)
    row["cost"] = None if cost is None or before is None else before + cost


def write(rows: Iterator[Row], format: str, out: str) -> None:
    """`out`: a file, or "-" for stdout. Raises StartupError."""
    if format == "parquet":
        _parquet(list(rows), out)
        return
    if out == "-":
        _text(rows, format, sys.stdout)
        return
    try:
        with open(out, "w", newline="") as file:
            _text(rows, format, file)
    except OSError as error:
        raise StartupError(f"cannot write {out}: {error.strerror}", remedy="another --output") from error


def _text(rows: Iterator[Row], format: str, stream: IO[str]) -> None:
    if format == "jsonl":
        for row in rows:
            stream.write(json.dumps(row, separators=(",", ":")) + "\n")
    elif format == "csv":
        _csv(rows, stream)
    else:
        _table(list(rows), stream)


def _csv(rows: Iterator[Row], stream: IO[str]) -> None:
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(stream, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: _inert(value) for name, value in row.items()})


def _inert(value: Any) -> Any:
    """A spreadsheet must not take a client's text (an operation's name) for a formula."""
    return "'" + value if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def _table(rows: list[Row], stream: IO[str]) -> None:
    if not rows:
        stream.write("no usage\n")
        return
    names = [n for n in rows[0] if not n.startswith("paid_")]
    if "id" in rows[0]:
        names = [n for n in (*_SHOWN, "cost") if n in rows[0]]
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(c[i]) for c in cells)) for i, name in enumerate(names)]
    right = [isinstance(rows[0].get(name), int) or name == "cost" for name in names]
    for line in (names, *cells):
        parts = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(line, widths, right, strict=True)]
        stream.write("  ".join(parts).rstrip() + "\n")


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-" if value in (None, "") else str(value)


def _parquet(rows: list[Row], out: str) -> None:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise StartupError("Parquet needs pyarrow", remedy="pip install 'evap[parquet]', or --format csv") from None
    if out == "-":
        raise StartupError("Parquet is not for a terminal", remedy="--output usage.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), out)
