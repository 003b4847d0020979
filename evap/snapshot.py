"""All numbers of a process at one moment; those of several add up to one page, with exact sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from prometheus_client import Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import CollectorRegistry

#: Gauges that say whether all is well: of several processes the least counts. Other values are added.
LEAST: Final = frozenset(("evap_ready", "evap_ledger_ok", "evap_sink_ok"))
#: A share of something that is one for all.
MOST: Final = frozenset(("evap_kv_cache_usage",))


class Snapshot(msgspec.Struct):
    """All numbers of a process, plain. values: family -> label's value ("" without a label) -> number.
    histograms: family -> (counts by bucket, sum). families: of those that are not in FAMILIES: (kind, text, label)."""

    values: dict[str, dict[str, float]]
    histograms: dict[str, tuple[list[int], float]]
    families: dict[str, tuple[str, str, str]]


read_snapshot: Final = msgspec.msgpack.Decoder(Snapshot).decode


def merged(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Of several processes, as if it were one."""
    total = Snapshot({}, {}, {})
    for snapshot in snapshots:
        total.families.update(snapshot.families)
        for name, values in snapshot.values.items():
            into = total.values.setdefault(name, {})
            for label, value in values.items():
                known = into.get(label)
                add = min if name in LEAST else max if name in MOST else float.__add__
                into[label] = value if known is None else add(float(known), float(value))
        for name, (counts, size) in snapshot.histograms.items():
            old, old_size = total.histograms.get(name, ([0] * len(counts), 0.0))
            total.histograms[name] = ([a + b for a, b in zip(old, counts, strict=True)], old_size + size)
    return total


def counted(snapshot: Snapshot) -> Snapshot:
    """What stays true of a process when it is dead: no gauges."""
    gauges = {name for name, (kind, _, _) in snapshot.families.items() if kind == "gauge"}
    return Snapshot(
        {name: values for name, values in snapshot.values.items() if name not in gauges}, snapshot.histograms,
        {name: family for name, family in snapshot.families.items() if name not in gauges},
    )  # fmt: skip


def of_process(name: str, pid: int | str) -> Snapshot:
    """What the system says of a process (`process_*`, with the label `process`); nothing of one that is gone."""
    collector = ProcessCollector(pid=lambda: pid, registry=CollectorRegistry())
    return _read(collector.collect(), "process", name)


def of_python() -> Snapshot:
    """What Python says of this process's garbage (`python_gc_*`), by generation."""
    return _read(GCCollector(registry=CollectorRegistry()).collect(), "generation")


def _read(metrics: Iterable[Metric], label: str, value: str = "") -> Snapshot:
    found = Snapshot({}, {}, {})
    for metric in metrics:
        found.values[metric.name] = {sample.labels.get(label, value): sample.value for sample in metric.samples}
        found.families[metric.name] = (metric.type, metric.documentation, label)
    return found
