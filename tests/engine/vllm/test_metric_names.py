"""The names and buckets under which evap serves vLLM's metrics are those of the installed vLLM."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from evap.metrics import FAMILIES, VLLM
from tests.engine.vllm.live import NEEDS_VLLM

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def loggers() -> str:
    """Read, not imported: that would take seconds and register them all."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return (Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py").read_text()


def test_each_name_is_one_of_vllms_with_the_same_type(loggers: str) -> None:
    types = {name: kind for kind, name in re.findall(r'self\._(\w+)_cls\(\s*name="vllm:(\w+)"', loggers)}
    for name, (ours, _) in VLLM.items():
        expected = FAMILIES[ours].kind if ours in FAMILIES else "gauge"
        assert types.get(name) == expected, name


def test_the_buckets_are_vllms() -> None:
    from vllm.v1.metrics import buckets

    same = {
        "time_to_first_token_seconds": "TIME_TO_FIRST_TOKEN_BUCKETS",
        "inter_token_latency_seconds": "INTER_TOKEN_LATENCY_BUCKETS",
        "request_time_per_output_token_seconds": "INTER_TOKEN_LATENCY_BUCKETS",
        "e2e_request_latency_seconds": "REQUEST_LATENCY_BUCKETS",
        "request_queue_time_seconds": "REQUEST_LATENCY_BUCKETS",
        "request_prefill_time_seconds": "REQUEST_LATENCY_BUCKETS",
        "request_inference_time_seconds": "REQUEST_LATENCY_BUCKETS",
        "request_decode_time_seconds": "REQUEST_LATENCY_BUCKETS",
        "request_params_n": "REQUEST_PARAMS_N_BUCKETS",
    }
    for name, theirs in same.items():
        assert VLLM[name][1] == getattr(buckets, theirs), name
    assert VLLM["request_prompt_tokens"][1][:10] == tuple(buckets.build_1_2_5_buckets(1000))
