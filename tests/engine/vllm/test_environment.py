"""Variables that vLLM reads at its import."""

from __future__ import annotations

from evap.config import EngineConfig
from evap.engine.vllm.environment import prepare_environment


def test_what_the_user_set_stays() -> None:
    env = {"VLLM_NO_USAGE_STATS": "0", "OMP_NUM_THREADS": "3"}
    prepare_environment(EngineConfig(device="cpu", threads=2), env)
    assert env["VLLM_NO_USAGE_STATS"] == "0"
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["VLLM_TARGET_DEVICE"] == "cpu"
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_threads_and_device_are_left_alone_by_default() -> None:
    env: dict[str, str] = {}
    prepare_environment(EngineConfig(), env)
    assert set(env) == {"VLLM_NO_USAGE_STATS", "VLLM_WORKER_MULTIPROC_METHOD"}
