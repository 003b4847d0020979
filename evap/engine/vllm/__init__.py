"""vLLM's engine, models, quantisation and parallelism without its front-end; the only importer of vllm.

replica.py      the Replica: lifecycle, restarts, submit and cancel; imports no vllm until it starts
boot.py         what a start needs of vLLM, imported when it starts
router.py       several replicas as one
environment.py  variables that vLLM reads when it is imported
options.py      evap's options and --vllm-arg -> vLLM's configuration
mapping.py      a GenerateRequest -> what vLLM takes, and what is refused before it
constraints.py  structured output in its three spellings
ids.py          request ids that name their slot
runs.py         which engine request is which slot; rows -> TokenBatch; no I/O
plain.py        the engine core's message of a step -> arrays of plain tokens, without an object a token
rows.py         all else in that message -> rows
client.py       seam "core": EngineCore's client below AsyncLLM
llm.py          seam "async-llm": the fall-back for releases that the core client does not fit
shared.py       shared memory, doorbell and log pipe between this process and the engine's
scheduler.py    runs in the engine process: final tokens into the ring (--token-path scheduler)
worker.py       runs in the worker process: the meter, right after sampling
progress.py     the engine's log -> what a person waiting for it wants to read
names.py        every name of vLLM that is used here, and a check that they still mean what they did
"""

from __future__ import annotations

from pathlib import Path

from evap.config import EngineConfig
from evap.engine.interface import Replica
from evap.engine.vllm.replica import VllmReplica
from evap.engine.vllm.router import Router

__all__ = ["Router", "VllmReplica", "build"]


def build(config: EngineConfig, model_path: Path) -> Replica:
    """One engine, or `config.replicas` of them behind a router, each with its own GPUs. Imports no vllm yet."""
    if config.replicas == 1:
        return VllmReplica(config, model_path)
    size = config.tensor_parallel_size
    gpus = [() if config.device == "cpu" else tuple(range(n * size, (n + 1) * size)) for n in range(config.replicas)]
    return Router([VllmReplica(config, model_path, gpus=own, number=n) for n, own in enumerate(gpus)])
