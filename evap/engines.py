"""The one factory of engines. Heavy ones are imported by name, here, when they are asked for: `--engine synthetic`
starts without torch, tokenizers or vllm being installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evap.config import EngineConfig
from evap.engine.choose import choose
from evap.engine.interface import Clock, Guest, Host, Replica, Text
from evap.engine.meter import Spec

#: Asks the process that has started the engine for a way to it, for the one whose counters page is given.
Ask = Callable[[Spec | None], None]


@dataclass(frozen=True, slots=True)
class Built:
    """What a configuration gave: an engine (and which one), its text side, and the name that clients use."""

    engine: str
    replica: Replica
    text: Text
    model: str
    chat: bool
    path: str = ""  #: the model's directory, for whoever needs the text side again
    guest: Guest | None = None  #: the engine, if another process has started it


def build(config: EngineConfig, clock: Clock, ask: Ask | None = None) -> Built:
    """Raises StartupError with a remedy when the engine or the model is not to be had.

    ask: another process runs the engine, and has fetched the model (`build_host`).
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
    guest = _guest(engine, config, local.path, ask) if ask is not None else None
    replica = guest if guest is not None else _replica(engine, config, local.path)
    name = config.served_model_name or local.name
    return Built(engine, replica, text, name, text.has_template, str(local.path), guest)


def _replica(engine: str, config: EngineConfig, path: Path) -> Replica:
    if engine == "vllm":
        from evap.engine import vllm

        return vllm.build(config, path)
    from evap.engine.supervisor import TorchReplica

    return TorchReplica(config, path)


def _guest(engine: str, config: EngineConfig, path: Path, ask: Ask) -> Guest:
    if engine == "vllm":
        from evap.engine import vllm

        return vllm.build_guest(config, path, ask)
    from evap.engine.channel import ChannelReplica

    return ChannelReplica(ask)


def build_host(config: EngineConfig, processes: int) -> Host | None:
    """The engine that so many loop processes share, and its model fetched; None where each has its own.

    Raises StartupError for what cannot be shared.
    """
    engine = choose(config.engine)
    if engine == "synthetic":
        return None
    if engine == "vllm":
        from evap.engine import vllm

        vllm.check_shared(config)
    from evap.engine.model import resolve
    from evap.engine.model_cli import console_progress

    with console_progress() as progress:
        local = resolve(config.model, progress)
    if engine == "vllm":
        return vllm.build_host(config, local.path, processes)
    from evap.engine.supervisor import TorchReplica

    return TorchReplica(config, local.path)


def _synthetic(config: EngineConfig, clock: Clock) -> Built:
    from evap.engine.synthetic import SyntheticReplica, SyntheticText

    name = config.served_model_name or config.model or "synthetic"
    return Built("synthetic", SyntheticReplica(config, clock), SyntheticText(), name, True)
