"""From a configuration and a model directory to a model in memory, with room for its KV cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    with room_for(f"the model's weights on {device}", "take a smaller model, or --dtype bfloat16"):
        weights = load_weights(path, config, device, dtype, progress)
    blocks = _blocks(engine, config, device, dtype, wanted)
    max_len = min(wanted, blocks * BLOCK_SIZE)
    if max_len < engine.max_model_len:
        raise StartupError(
            f"the KV cache holds {max_len} tokens, less than max_model_len {engine.max_model_len}",
            remedy="raise --kv-cache-mb or lower --max-model-len",
        )
    shape = (config.layers, blocks, BLOCK_SIZE, 2, config.kv_heads, config.head_dim)
    size = blocks * BLOCK_SIZE * config.kv_values * dtype.itemsize >> 20
    with room_for(f"a KV cache of {size} MiB on {device}", "lower --kv-cache-mb, or --max-model-len and --max-running"):
        cache = PagedCache(_zeros(shape, device, dtype))
    model = Model(config, weights, cache, Rotary(config.rope, config.head_dim, device, dtype))
    return Loaded(config, model, device, dtype, blocks, max_len)


def is_out_of_memory(error: Exception) -> bool:
    """torch's CPU allocator has no exception type of its own."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


@contextlib.contextmanager
def room_for(what: str, remedy: str) -> Iterator[None]:
    """Memory that cannot be had while starting is something that a person can put right."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(f"there is not enough memory for {what}", remedy=remedy) from error


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
        # On a CPU it would be had, and the process killed when it is used.
        if engine.kv_cache_mb > (most := int(_total_bytes(device)) >> 20):
            raise StartupError(
                f"a KV cache of {engine.kv_cache_mb} MiB is more than all the memory of {device}, {most} MiB",
                remedy="lower --kv-cache-mb, or leave it out: then it takes a share of what is free",
            )
        return max(1, (engine.kv_cache_mb << 20) // block_bytes)
    useful = engine.max_running * -(-max_len // BLOCK_SIZE)
    return max(1, min(useful, int(_free_bytes(device)) // block_bytes))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * _GPU_SHARE
    return min(_available_memory(), _cgroup_memory()) * _CPU_SHARE


def _total_bytes(device: torch.device) -> float:
    """All that the device has, in use or not."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return min(_meminfo("MemTotal") + _meminfo("SwapTotal"), _cgroup("memory.max"))


def _available_memory() -> float:
    return _meminfo("MemAvailable") or 4.0 * 2**30


def _meminfo(name: str) -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024.0
    return 0.0


def _cgroup_memory() -> float:
    """What the container leaves (cgroup v2), or infinity."""
    most = _cgroup("memory.max")
    return most if most == float("inf") else most - _cgroup("memory.current")


def _cgroup(name: str) -> float:
    try:
        return float((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # numpy's zeros are not touched until they are used; torch's are written at once.
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
