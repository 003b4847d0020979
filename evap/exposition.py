"""Prometheus' text format 0.0.4, written straight: a page of thousand lines is made on the loop, between two tokens.

prometheus_client makes the same text from objects of its own in five times the time; tests read pages with its parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Labels = Mapping[str, str]


def family(name: str, kind: str, help: str, label: str, values: Mapping[str, float], own: Labels) -> list[str]:
    """Lines of a counter (whose name gets `_total`) or gauge. values: value of `label` -> number; of the only one if
    label is "". own: labels that all have."""
    name = f"{name}_total" if kind == "counter" else name
    lines = _head(name, kind, help)
    for value, number in values.items():
        lines.append(f"{name}{_labels({**own, label: value} if label else own)} {number}")
    return lines


def histogram(
    name: str, help: str, bounds: Sequence[float], counts: Sequence[int], total: float, wanted: Sequence[float],
    own: Labels,
) -> list[str]:  # fmt: skip
    """Lines of a histogram. counts: by bucket, not cumulative, one more than bounds. wanted: the bounds to show."""
    lines = _head(name, "histogram", help)
    inside, below, shown = _labels(own)[1:-1], 0, set(wanted)
    start = f"{name}_bucket{{{inside}," if inside else f"{name}_bucket{{"
    for bound, count in zip(bounds, counts, strict=False):
        below += count
        if bound in shown:
            lines.append(f'{start}le="{float(bound)}"}} {below}')
    whole, labels = below + counts[-1], _labels(own)
    return [*lines, f'{start}le="+Inf"}} {whole}', f"{name}_count{labels} {whole}", f"{name}_sum{labels} {total}"]


def _head(name: str, kind: str, help: str) -> list[str]:
    text = help.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _labels(labels: Labels) -> str:
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in labels.items()]) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
