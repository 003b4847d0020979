"""The one factory of engines. Heavy ones are imported by name, here, when they are asked for: `--engine synthetic`
starts without torch, tokenizers or vllm being installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evap.config import EngineConfig
from evap.engine.choose import choose
from evap.engine.interface import Clock, Replica, Text
from evap.errors import StartupError

if TYPE_CHECKING:
    from evap.engine.supervisor import TorchReplica


@dataclass(frozen=True, slots=True)
class Built:
    """What a configuration gave: an engine (and which one), its text side, and the name that clients use."""

    engine: str
    replica: Replica
    text: Text
    model: str
    chat: bool
    path: str = ""  #: the model's directory, for whoever needs the text side again


def build(config: EngineConfig, clock: Clock, shared: Replica | None = None) -> Built:
    """Raises StartupError with a remedy when the engine or the model is not to be had.

    shared: an engine that another process runs, for a model that is here already.
    """
    engine = choose(config.engine)
    if engine == "synthetic":
        return _synthetic(config, clock)
    from evap.engine.model import resolve
    from evap.engine.model_cli import console_progress
    from evap.engine.tokenizer import load_text

    with console_progress() as progress:
        local = resolve(config.model, progress)
    text = load_text(local.path, cache_mb=config.token_cache_mb)
    replica: Replica
    if shared is not None:
        replica = shared
    elif engine == "vllm":
        from evap.engine import vllm

        replica = vllm.build(config, local.path)
    else:
        from evap.engine.supervisor import TorchReplica

        replica = TorchReplica(config, local.path)
    return Built(engine, replica, text, config.served_model_name or local.name, text.has_template, str(local.path))


def build_shared(config: EngineConfig) -> TorchReplica | None:
    """For several loop processes: the engine that they share, and its model fetched; None where each has its own.

    Raises StartupError for an engine that cannot be shared.
    """
    engine = choose(config.engine)
    if engine == "synthetic":
        return None
    if engine == "vllm":
        raise StartupError(
            "--workers needs the torch or the synthetic engine: vLLM's core answers to one process",
            remedy="--workers 1, with --replicas N for more engines",
        )
    from evap.engine.model import resolve
    from evap.engine.model_cli import console_progress
    from evap.engine.supervisor import TorchReplica

    with console_progress() as progress:
        local = resolve(config.model, progress)
    return TorchReplica(config, local.path)


def _synthetic(config: EngineConfig, clock: Clock) -> Built:
    from evap.engine.synthetic import SyntheticReplica, SyntheticText

    name = config.served_model_name or config.model or "synthetic"
    return Built("synthetic", SyntheticReplica(config, clock), SyntheticText(), name, True)
