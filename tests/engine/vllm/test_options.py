"""evap's options and --vllm-arg become vLLM's configuration, or one line that says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evap.errors import StartupError
from tests.engine.vllm.live import NEEDS_VLLM, config

pytestmark = NEEDS_VLLM


def args(model: Path, **options: Any) -> Any:
    from evap.engine.vllm.options import engine_args

    return engine_args(config(**options), model, None)


def test_evaps_flags_arrive(tiny: Path) -> None:
    found = args(
        tiny, tensor_parallel_size=2, gpu_memory_utilization=0.5, quantization="fp8", kv_cache_dtype="fp8",
        max_num_seqs=7, enforce_eager=True, dtype="float32", max_model_len=512, kv_cache_mb=3,
    )  # fmt: skip
    assert (found.tensor_parallel_size, found.gpu_memory_utilization, found.quantization) == (2, 0.5, "fp8")
    assert (found.kv_cache_dtype, found.max_num_seqs, found.enforce_eager) == ("fp8", 7, True)
    assert (found.dtype, found.max_model_len, found.kv_cache_memory_bytes) == ("float32", 512, 3 << 20)
    assert found.scheduling_policy == "priority"
    assert args(tiny, vllm_arg=("scheduling-policy=fcfs",)).scheduling_policy == "fcfs"
    assert found.disable_log_stats


def test_vllm_args_of_every_kind(tiny: Path) -> None:
    found = args(
        tiny,
        vllm_arg=(
            "max-num-batched-tokens=256", "enable_prefix_caching=false", "scheduling_policy=priority", "seed=3",
            'speculative_config={"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":3}',
            "trust_remote_code",
        ),
    )  # fmt: skip
    assert (found.max_num_batched_tokens, found.enable_prefix_caching, found.scheduling_policy) == (
        256,
        False,
        "priority",
    )
    assert (found.seed, found.trust_remote_code) == (3, True)
    assert found.speculative_config["num_speculative_tokens"] == 2


@pytest.mark.parametrize(
    ("given", "message", "remedy"),
    [
        ("max_num_sequences=4", "no such option", "max_num_seqs"),
        ("scheduler_cls=x.Y", "evap's own", "--token-path"),
        ("model=other", "evap's own", "MODEL"),
        ("max_model_len=4", "contradicts", "one of them"),
        ("block_size=many", "refuses", ""),
        ("async_scheduling=maybe", "true or false", "async_scheduling=true"),
        ("=4", "expected key=value", ""),
        ("help=block_size", "block", "--vllm-arg block_size="),
        ("help", "vLLM's options", ""),
        ("help=colour", "no such option", ""),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tiny: Path, given: str, message: str, remedy: str) -> None:
    with pytest.raises(StartupError) as caught:
        args(tiny, vllm_arg=(given,))
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_a_key_given_twice(tiny: Path) -> None:
    with pytest.raises(StartupError, match="twice"):
        args(tiny, vllm_arg=("seed=1", "seed=2"))


@pytest.mark.parametrize(
    "options",
    [{"vllm_seam": "async-llm", "token_path": "scheduler"}, {"vllm_arg": ("data_parallel_size=2",)}],
)
def test_what_a_seam_cannot_do(tiny: Path, options: dict[str, Any]) -> None:
    with pytest.raises(StartupError):
        args(tiny, **options)


def test_rope_scaling_keeps_theta(tiny: Path) -> None:
    found = args(tiny, rope_scaling='{"rope_type":"dynamic","factor":4}')
    assert found.hf_overrides["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4}


def test_a_long_context_by_rope_scaling(tiny: Path) -> None:
    from evap.engine.vllm.options import engine_config

    wanted = config(
        rope_scaling='{"rope_type":"yarn","factor":50,"original_max_position_embeddings":4096}', max_model_len=200_000
    )
    found = engine_config(wanted, tiny, None).model_config
    assert found.max_model_len == 200_000
    assert found.hf_config.rope_parameters["rope_theta"] == 10000.0
    longer = config(rope_scaling='{"rope_type":"dynamic","factor":50}', max_model_len=200_000)
    assert engine_config(longer, tiny, None).model_config.max_model_len == 200_000


def test_a_model_that_is_none_is_said(tmp_path: Path) -> None:
    from evap.engine.vllm.options import engine_config

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "colour"}))
    with pytest.raises(StartupError, match="refuses"):
        engine_config(config(), tmp_path, None)


def test_kv_memory_on_a_cpu_leaves_room() -> None:
    from evap.engine.vllm.options import cpu_kv_bytes

    assert cpu_kv_bytes("MemTotal: 9 kB\nMemAvailable:   16777216 kB\n") == 4 << 30
    assert cpu_kv_bytes("MemAvailable: 1000000000 kB\n") == 8 << 30
    assert cpu_kv_bytes("MemAvailable: 1024 kB\n") == 256 << 20
    assert cpu_kv_bytes("") == 1 << 30


def test_the_scheduler_follows_vllms_choice() -> None:
    from types import SimpleNamespace

    from evap.engine.vllm.options import choose_scheduler

    for path, asynchronous, name in (
        ("scheduler", False, "RingScheduler"), ("scheduler", True, "AsyncRingScheduler"),
        ("core", False, "TellingScheduler"), ("core", True, "AsyncTellingScheduler"),
    ):  # fmt: skip
        scheduler = SimpleNamespace(async_scheduling=asynchronous, scheduler_cls=None)
        choose_scheduler(scheduler, path)
        assert scheduler.scheduler_cls.endswith(f".{name}")


def test_a_scheduler_that_vllm_needs_is_left_alone() -> None:
    from types import SimpleNamespace

    from evap.engine.vllm.options import choose_scheduler

    special = SimpleNamespace(async_scheduling=True, scheduler_cls="vllm.v1.core.sched.diffusion_scheduler.Some")
    choose_scheduler(special, "core")
    assert special.scheduler_cls.endswith(".Some")
    with pytest.raises(StartupError, match="wants its"):
        choose_scheduler(special, "scheduler")
