"""The tables of `docs/observability.md`, from the code that counts. `python -m tests.tools.metrics_table --write`."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from evap import questions
from evap.config import EngineConfig
from evap.metrics import FAMILIES, VLLM
from evap.observe import ENGINE_COUNTERS, watch
from evap.protocol.limits import Shared
from tests.metered import Metered
from tests.tools import pages
from tests.tools.architecture import ROOT

PAGE: Final = ROOT / "docs" / "observability.md"
MARK: Final = "<!-- table: python -m tests.tools.metrics_table --write -->"
END: Final = "<!-- end of table -->"


def page() -> str:
    """What `/metrics` says of a server that has everything: a ledger, a sink, spans, an engine that counts."""
    with tempfile.TemporaryDirectory() as folder:
        house = Metered(Path(folder))
        replica: Any = house.replica
        for name in (*ENGINE_COUNTERS, "kv_usage"):
            setattr(replica, name, 0)
        sink: Any = SimpleNamespace(copied=0, error="")
        counts, energy = SimpleNamespace(mismatches=0), SimpleNamespace(total_mj=0)
        house.accounting.sink, house.accounting.pages, house.accounting.energy = sink, counts, energy  # type: ignore[assignment]
        watch(house.metrics, house.dispatch, Shared(), EngineConfig(), SimpleNamespace(exported=0, dropped=0))  # type: ignore[arg-type]
        text = house.metrics.render([questions.numbers([])]).decode()
        house.accounting.sink = house.accounting.pages = house.accounting.energy = None
        house.accounting.close()
    return text


def families() -> dict[str, tuple[str, str]]:
    """Name as it is scraped -> (type, help)."""
    text = page()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    return {name: (kinds[name], help) for name, help in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE)}


def table() -> str:
    """Two tables: evap's own names, and vLLM's."""
    label = {f"{name}_total" if f.kind == "counter" else name: f.label for name, f in FAMILIES.items()}
    lines = ["| name | type | label | what |", "| --- | --- | --- | --- |"]
    for name, (kind, help) in families().items():
        if name.startswith("evap_"):
            own = f"`{label[name]}`" if label.get(name) else ""
            lines.append(f"| `{name}` | {kind} | {own} | {help} |")
    lines += ["", "| vLLM's name | evap's |", "| --- | --- |"]
    names = {f.name: f for f in text_string_to_metric_families(page())}
    for name, (ours, _) in VLLM.items():
        kind = names[f"vllm:{name}"].type
        suffix = "_total" if kind == "counter" else ""
        lines.append(f"| `vllm:{name}{suffix}` | `{ours}{suffix}` |")
    return "\n".join(lines)


def written() -> str:
    """The page as it should be."""
    return pages.filled(PAGE, MARK, END, table())


if __name__ == "__main__":
    sys.exit(pages.main(sys.argv[1:], PAGE, written))
