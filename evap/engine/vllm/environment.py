"""Environment variables that vLLM reads when it is imported, so they are set before that."""

from __future__ import annotations

from collections.abc import MutableMapping

from evap.config import EngineConfig


def prepare_environment(config: EngineConfig, env: MutableMapping[str, str]) -> None:
    """Variables that evap needs; what the user has set stays."""
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a process with a loop and threads must not fork
    if config.device == "cpu":
        env.setdefault("VLLM_TARGET_DEVICE", "cpu")
    if config.threads:
        env.setdefault("OMP_NUM_THREADS", str(config.threads))
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
