"""Mixed exchanges, a killed engine, a killed server: ledger, /metrics, trailers, usage events, the engine's own page
and the client's own counts agree (bench/reconcile.py has the script).

EVAP_TEST_EXCHANGES sets how many (120 and 60 if it is not set).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import mixture, reconcile

EXCHANGES = int(os.environ.get("EVAP_TEST_EXCHANGES", "0"))


@pytest.mark.timeout(600)
def test_everything_agrees_to_the_token(tmp_path: Path) -> None:
    found = reconcile.reconcile(mixture.Run(tmp_path, mixture.synthetic(), EXCHANGES or 120))
    assert {"stop", "length", "budget", "client_abort", "engine_failed", "interrupted"} <= set(found["ends"])


@pytest.mark.timeout(600)
def test_everything_agrees_with_a_real_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    found = reconcile.reconcile(mixture.Run(tmp_path, mixture.torch(tmp_path / "model"), EXCHANGES or 60))
    assert {"stop", "length", "client_abort", "engine_failed", "interrupted"} <= set(found["ends"])
    assert found["tokens"]["computed"] > found["tokens"]["emitted"], "what was sampled and never came is counted too"
