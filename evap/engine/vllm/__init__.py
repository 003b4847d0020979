"""vLLM's engine, models, quantisation and parallelism without its front-end; the only importer of vllm.

replica.py      the Replica: lifecycle, restarts, submit and cancel; imports no vllm until it starts
boot.py         what a start needs of vLLM, imported when it starts
router.py       several replicas as one
host.py         an engine that several processes use (--workers), in the one that starts it
guest.py        the same engine, in each of the others
fronts.py       their sockets
addresses.py    where these are
table.py        which requests of a process run, where the host can see it
environment.py  variables that vLLM reads when it is imported
options.py      evap's options and --vllm-arg -> vLLM's configuration
mapping.py      a GenerateRequest -> what vLLM takes, and what is refused before it
constraints.py  structured output in its three spellings
ids.py          request ids that name their slot
runs.py         which engine request is which slot; rows -> TokenBatch; no I/O
plain.py        the engine core's message of a step -> arrays of plain tokens, without an object a token
rows.py         all else in that message -> rows
client.py       seam "core": EngineCore's client below AsyncLLM
wire.py         the engine core's connections, taken over from vLLM's client
zmtp.py         what is spoken on them; no I/O
zmqwire.py      the same by libzmq, for an engine that is not on this machine
llm.py          seam "async-llm": the fall-back for releases that the core client does not fit
shared.py       shared memory, doorbell and log pipe between this process and the engine's
scheduler.py    runs in the engine process: final tokens into the ring (--token-path scheduler)
worker.py       runs in the worker process: the meter, right after sampling
progress.py     the engine's log -> what a person waiting for it wants to read
names.py        every name of vLLM that is used here, and a check that they still mean what they did
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evap.config import EngineConfig
from evap.engine.interface import Guest, Host, Replica
from evap.engine.meter import Spec
from evap.engine.vllm.guest import VllmGuest
from evap.engine.vllm.host import VllmHost
from evap.engine.vllm.replica import VllmReplica
from evap.engine.vllm.router import Router
from evap.errors import StartupError

__all__ = ["Router", "VllmReplica", "build", "build_guest", "build_host", "check_shared"]


def build(config: EngineConfig, model_path: Path) -> Replica:
    """One engine, or `config.replicas` of them behind a router, each with its own GPUs. Imports no vllm yet."""
    if config.replicas == 1:
        return VllmReplica(config, model_path)
    size = config.tensor_parallel_size
    gpus = [() if config.device == "cpu" else tuple(range(n * size, (n + 1) * size)) for n in range(config.replicas)]
    return Router([VllmReplica(config, model_path, gpus=own, number=n) for n, own in enumerate(gpus)])


def check_shared(config: EngineConfig) -> None:
    """Raises StartupError for what --workers cannot do."""
    if config.vllm_seam != "core":
        raise StartupError("--workers needs --vllm-seam core: AsyncLLM is the only user of its engine")
    if config.replicas > 1:
        raise StartupError(
            "--workers goes with one engine so far, not with --replicas",
            remedy="--workers 1 with --replicas N, or a server for each engine",
        )


def build_host(config: EngineConfig, model_path: Path, processes: int) -> Host:
    """The engine that so many loop processes share."""
    return VllmHost(config, model_path, processes)


def build_guest(config: EngineConfig, model_path: Path, ask: Callable[[Spec | None], None]) -> Guest:
    """The same engine, in a loop process. ask: for a way to it."""
    return VllmGuest(config, model_path, ask)
