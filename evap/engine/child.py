"""A child process: what it is given, and how its end is said."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def environment() -> dict[str, str]:
    """Ours, such that the child finds this very package whatever its working directory is.

    GOMP_SPINCOUNT: OpenMP threads that wait for each other spin for milliseconds by default, which takes the core from
    whoever they wait for as soon as anything else runs: with one busy process beside them on two cores a step takes 30
    times as long. With a short spin it takes twice as long, and on idle cores as long as ever.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    patience = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "2000"}
    return {**patience, **os.environ, "PYTHONPATH": path}


def describe_end(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
