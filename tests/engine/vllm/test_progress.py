"""Lines of a real start of vLLM 0.32, and what is shown of them."""

from __future__ import annotations

import pytest

from evap.engine.vllm.progress import progress_of, root_cause


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Initializing a V1 LLM engine (v0.32.0) with config: model='x'", "engine process is up"),
        ("Starting to load model /tmp/tiny...", "loading weights"),
        ("Loading weights took 0.01 seconds", "weights loaded in 0.01 s"),
        ("CPU KV cache size: 8,388,608 tokens, Maximum concurrency for 2,048 tokens", "KV cache for 8,388,608 tokens"),
        ("init engine (profile, create kv cache, warmup model) took 2.87 s", "engine initialised in 2.87 s"),
        ("Warming up model for the compilation...", "warming up"),
        ("world_size=1 rank=0 local_rank=0", ""),
    ],
)
def test_progress(message: str, line: str) -> None:
    assert progress_of(message) == line


def test_the_root_cause_is_the_first_exception() -> None:
    lines = [
        "something is odd",
        "EngineCore failed to start. (ValueError: 2 GiB KV cache is needed, which is larger (than that))",
        "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.",
    ]
    assert root_cause(lines) == "ValueError: 2 GiB KV cache is needed, which is larger (than that)"
    assert root_cause(lines[:1]) == "something is odd"
    assert root_cause([]) == ""
