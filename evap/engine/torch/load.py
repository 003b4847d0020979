"""From a configuration and a model directory to a model in memory, with room for its KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from evap.config import EngineConfig
from evap.engine.torch.attention import PagedCache
from evap.engine.torch.config import ModelConfig, load_config
from evap.engine.torch.model import Model, pick_device, pick_dtype
from evap.engine.torch.rope import Rotary
from evap.engine.torch.weights import load_weights
from evap.errors import StartupError, echo

BLOCK_SIZE = 16
#: Of the memory that is free, how much the KV cache takes. On a CPU it is only touched when it is used.
_CPU_SHARE = 0.25
_GPU_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Loaded:
    """blocks: of BLOCK_SIZE positions. max_len: tokens of a sequence, prompt and output; fits the blocks."""

    config: ModelConfig
    model: Model
    device: torch.device
    dtype: torch.dtype
    blocks: int
    max_len: int


def load(engine: EngineConfig, path: Path, progress: Callable[[str], None]) -> Loaded:
    """Read a model for an engine. Raises StartupError for what a person can put right."""
    if engine.threads:
        torch.set_num_threads(engine.threads)
    config = load_config(path, engine.rope_scaling)
    device = _device(engine.device)
    dtype = pick_dtype(engine.dtype, device, config.stored_dtype)
    wanted = _context(engine, config)
    progress(f"loading {path.name} for {device} in {str(dtype).removeprefix('torch.')}")
    weights = load_weights(path, config, device, dtype, progress)
    blocks = _blocks(engine, config, device, dtype, wanted)
    max_len = min(wanted, blocks * BLOCK_SIZE)
    if max_len < engine.max_model_len:
        raise StartupError(
            f"the KV cache holds {max_len} tokens, less than max_model_len {engine.max_model_len}",
            remedy="raise --kv-cache-mb or lower --max-model-len",
        )
    shape = (config.layers, blocks, BLOCK_SIZE, 2, config.kv_heads, config.head_dim)
    cache = PagedCache(_zeros(shape, device, dtype))
    model = Model(config, weights, cache, Rotary(config.rope, config.head_dim, device, dtype))
    return Loaded(config, model, device, dtype, blocks, max_len)


def _device(name: str) -> torch.device:
    try:
        device = pick_device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise StartupError(f"device {echo(name)} cannot be used: {reason}", remedy="--device cpu") from error
    return device


def _context(engine: EngineConfig, config: ModelConfig) -> int:
    asked = engine.max_model_len
    if asked > config.max_len and config.rope.rope_type != "dynamic":
        raise StartupError(
            f"max_model_len {asked} is beyond the model's context of {config.max_len}",
            remedy='scale its positions, e.g. --rope-scaling \'{"rope_type":"dynamic","factor":4}\'',
        )
    return asked or config.max_len


def _blocks(engine: EngineConfig, config: ModelConfig, device: torch.device, dtype: torch.dtype, max_len: int) -> int:
    """Blocks of the KV cache: what was asked for, or a share of the free memory, but no more than can be of use."""
    block_bytes = BLOCK_SIZE * config.kv_values * dtype.itemsize
    if engine.kv_cache_mb:
        return max(1, (engine.kv_cache_mb << 20) // block_bytes)
    useful = engine.max_running * -(-max_len // BLOCK_SIZE)
    return max(1, min(useful, int(_free_bytes(device)) // block_bytes))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * _GPU_SHARE
    return min(_available_memory(), _cgroup_memory()) * _CPU_SHARE


def _available_memory() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024.0
    return 4.0 * 2**30


def _cgroup_memory() -> float:
    """What the container leaves (cgroup v2), or infinity."""
    root = Path("/sys/fs/cgroup")
    try:
        return float((root / "memory.max").read_text()) - float((root / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # numpy's zeros are not touched until they are used; torch's are written at once.
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
