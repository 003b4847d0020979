from __future__ import annotations

import json

import pytest

from evap.messages import EngineInfo, ReplicaState
from evap.protocol.api.health import health_body, ready_body, version_body


def test_health_is_about_the_process_alone() -> None:
    assert json.loads(health_body()) == {"status": "ok"}


@pytest.mark.parametrize(
    ("states", "draining", "status", "word"),
    [
        ([ReplicaState.READY], False, 200, "ready"),
        ([ReplicaState.FAILED, ReplicaState.READY], False, 200, "ready"),
        ([ReplicaState.READY], True, 503, "draining"),
        ([ReplicaState.STARTING], False, 503, "unavailable"),
        ([ReplicaState.FAILED, ReplicaState.STOPPED], False, 503, "unavailable"),
        ([], False, 503, "unavailable"),
    ],
)
def test_ready(states: list[ReplicaState], draining: bool, status: int, word: str) -> None:
    got, body = ready_body([(s, "why") for s in states], draining=draining)
    data = json.loads(body)
    assert (got, data["status"]) == (status, word)
    assert data["replicas"] == [{"state": s.value, "detail": "why"} for s in states]


def test_version() -> None:
    assert json.loads(version_body("1.2", None)) == {"version": "1.2", "engine": None}
    info = EngineInfo(
        engine="torch", device="cpu", dtype="float32", max_model_len=1, vocab_size=1, max_running=1, version="2"
    )
    assert json.loads(version_body("1.2", info))["engine"] == {"name": "torch", "version": "2", "device": "cpu"}
