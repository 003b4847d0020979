from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evap.config import EngineConfig
from evap.engine.torch import load as module
from evap.engine.torch.load import BLOCK_SIZE, load
from evap.errors import StartupError
from tests.engine.torch.tiny import Maker

DYNAMIC = '{"rope_type":"dynamic","factor":4}'


def config(**settings: object) -> EngineConfig:
    return EngineConfig(dtype="float32", threads=1, **settings)  # type: ignore[arg-type]


def quiet(line: str) -> None:
    pass


def test_the_cache_takes_a_share_of_what_is_free_and_no_more_than_is_of_use(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = make()
    loaded = load(config(max_running=3), path, quiet)
    assert loaded.max_len == 256
    assert loaded.blocks == 3 * 256 // BLOCK_SIZE
    monkeypatch.setattr(module, "_available_memory", lambda: 4 * 100 * BLOCK_SIZE * 512.0)  # 512 bytes a token
    assert load(config(max_running=64), path, quiet).blocks == 100


def test_a_cache_smaller_than_the_context_shortens_it(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = make()
    monkeypatch.setattr(module, "_available_memory", lambda: 4 * 4 * BLOCK_SIZE * 512.0)
    assert load(config(), path, quiet).max_len == 64
    with pytest.raises(StartupError, match="holds 64 tokens"):
        load(config(max_model_len=200), path, quiet)


def test_kv_cache_mb_is_taken_at_its_word(make: Maker) -> None:
    loaded = load(config(kv_cache_mb=2), make()[1], quiet)
    assert loaded.blocks == 2 * 2**20 // (512 * BLOCK_SIZE)


def test_a_cache_larger_than_the_machine_is_refused(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="more than all the memory of cpu") as caught:
        load(config(kv_cache_mb=10**12), make()[1], quiet)
    assert "--kv-cache-mb" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "error", "words", "remedy"),
    [
        ("_zeros", MemoryError("Unable to allocate 879. GiB"), "for a KV cache of 2 MiB on cpu", "--kv-cache-mb"),
        ("_zeros", torch.OutOfMemoryError("CUDA out of memory"), "for a KV cache of 2 MiB on cpu", "--kv-cache-mb"),
        ("load_weights", RuntimeError("DefaultCPUAllocator: can't allocate memory"), "the model's weights", "smaller"),
    ],
)
def test_memory_that_cannot_be_had_is_said(
    make: Maker, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, words: str, remedy: str
) -> None:
    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr(module, name, refuse)
    with pytest.raises(StartupError, match="there is not enough memory") as caught:
        load(config(kv_cache_mb=2), make()[1], quiet)
    assert words in caught.value.message
    assert remedy in caught.value.remedy


def test_what_is_not_memory_is_not_called_so(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("another")

    monkeypatch.setattr(module, "_zeros", refuse)
    with pytest.raises(RuntimeError, match="another"):
        load(config(), make()[1], quiet)


def test_a_context_beyond_the_model_needs_scaled_positions(make: Maker) -> None:
    _, path = make()
    with pytest.raises(StartupError, match="beyond the model's context") as caught:
        load(config(max_model_len=1000), path, quiet)
    assert "--rope-scaling" in caught.value.remedy
    assert load(config(max_model_len=200_000, rope_scaling=DYNAMIC, kv_cache_mb=128), path, quiet).max_len == 200_000
    assert load(config(rope_scaling=DYNAMIC, kv_cache_mb=2), path, quiet).max_len == 1024


@pytest.mark.parametrize("device", ["cuda:77", "nonsense"])
def test_a_device_that_is_not_there(make: Maker, device: str) -> None:
    with pytest.raises(StartupError, match="cannot be used"):
        load(config(device=device), make()[1], quiet)


def test_not_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        load(config(), tmp_path, quiet)


def test_progress_is_told(make: Maker) -> None:
    lines: list[str] = []
    _, path = make()
    load(config(), path, lines.append)
    assert lines == [f"loading {path.name} for cpu in float32", "loading weights: layer 2 of 2"]


def test_the_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._cgroup_memory() > 0
    assert module._available_memory() > 0
    assert module._available_memory() < module._total_bytes(torch.device("cpu"))
    monkeypatch.setattr(module, "_cgroup_memory", lambda: 1000.0)
    assert module._free_bytes(torch.device("cpu")) == 250
