"""The factory: which engine a configuration gives, and under which name its model is served."""

from __future__ import annotations

from typing import Any

import pytest

from evap import engines
from evap.config import EngineConfig
from evap.engine.synthetic import SyntheticReplica
from evap.errors import StartupError
from tests.fakes import FakeLoop


@pytest.mark.parametrize(
    ("fields", "name"),
    [({}, "synthetic"), ({"model": "tiny"}, "tiny"), ({"model": "tiny", "served_model_name": "gpt"}, "gpt")],
)
def test_synthetic_and_its_name(fields: dict[str, Any], name: str) -> None:
    built = engines.build(EngineConfig(engine="synthetic", **fields), FakeLoop())
    assert isinstance(built.replica, SyntheticReplica)
    assert (built.engine, built.model, built.chat) == ("synthetic", name, True)


def test_a_missing_engine_is_said_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(engine: str) -> str:
        raise StartupError(f"no {engine}", remedy="pip install")

    monkeypatch.setattr(engines, "choose", missing)
    with pytest.raises(StartupError, match="no torch"):
        engines.build(EngineConfig(engine="torch", model="owner/name"), FakeLoop())


def test_a_missing_model_is_said_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "choose", lambda engine: "torch")
    with pytest.raises(StartupError, match="does not exist"):
        engines.build(EngineConfig(model="/nonexistent/model"), FakeLoop())


def test_what_auto_took_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an answer may be structured depends on the engine that runs, not on what was asked for."""
    monkeypatch.setattr(engines, "choose", lambda engine: "synthetic")
    assert engines.build(EngineConfig(engine="auto"), FakeLoop()).engine == "synthetic"


def test_several_loop_processes_share_an_engine_that_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.build_host(EngineConfig(engine="synthetic"), 2) is None  # each has its own
    monkeypatch.setattr(engines, "choose", lambda engine: engine)
    with pytest.raises(StartupError, match="--workers needs --vllm-seam core"):
        engines.build_host(EngineConfig(engine="vllm", vllm_seam="async-llm"), 2)
    for engine in ("torch", "vllm"):
        with pytest.raises(StartupError, match="does not exist"):
            engines.build_host(EngineConfig(engine=engine, model="/nonexistent/model"), 2)
