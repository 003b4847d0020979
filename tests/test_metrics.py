"""The metrics page: right sums, bounded labels, vLLM's names, and pages of several processes that add up."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from evap.messages import Usage
from evap.metrics import ENDS, FAMILIES, REASONS, VLLM, Metrics, Settled
from evap.snapshot import Snapshot, merged

Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(metrics: Metrics, *others: Snapshot) -> Samples:
    families = text_string_to_metric_families(metrics.render(others).decode())
    return {(s.name, tuple(v for _, v in sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def settled(**fields: object) -> Settled:
    usage = Usage(prompt=10, cached=4, computed=7, emitted=6, delivered=5)
    plain = {"reasons": ("stop",), "lengths": (6,), "queue_s": 0.001, "prefill_s": 0.1, "decode_s": 0.5, "whole_s": 0.7}
    return Settled(**{"status": 200, "end": "stop", "usage": usage, **plain, **fields})  # type: ignore[arg-type]


def test_sums_are_exact() -> None:
    metrics = Metrics("m")
    for _ in range(3):
        metrics.settled(settled())
        metrics.live.started(10, 4, 0.1)
        metrics.live.counts["generated"] += 7
    metrics.answered(404)
    got = samples(metrics)
    assert got["evap_requests_total", ("200",)] == 3
    assert got["evap_requests_total", ("404",)] == 1
    assert [got["evap_tokens_total", (k,)] for k in ("prompt", "cached", "computed", "emitted", "delivered")] == [
        30, 12, 21, 18, 15,
    ]  # fmt: skip
    assert got["vllm:prompt_tokens_total", ("m",)] == got["vllm:prefix_cache_queries_total", ("m",)] == 30
    assert got["vllm:prefix_cache_hits_total", ("m",)] == 12
    assert got["vllm:generation_tokens_total", ("m",)] == 21
    assert got["vllm:request_success_total", ("stop", "m")] == 3
    assert got["evap_request_duration_seconds_count", ()] == 3
    assert got["evap_request_duration_seconds_sum", ()] == pytest.approx(2.1)
    assert got["vllm:e2e_request_latency_seconds_bucket", ("0.5", "m")] == 0
    assert got["vllm:e2e_request_latency_seconds_bucket", ("0.8", "m")] == 3
    assert got["vllm:request_inference_time_seconds_sum", ("m",)] == pytest.approx(1.8)
    assert got["evap_token_seconds_bucket", ("0.1",)] == 3, "0.5 s for the five tokens after the first"


def test_only_complete_answers_are_timed() -> None:
    metrics = Metrics("m")
    metrics.settled(settled(end="client_reset", status=499, reasons=("abort",)))
    metrics.settled(settled(end="made up", status=400, reasons=()))
    got = samples(metrics)
    assert got["evap_request_duration_seconds_count", ()] == 0
    assert got["evap_choices_total", ("abort",)] == 1
    assert got["evap_tokens_total", ("computed",)] == 14, "what was used counts all the same"


def test_what_never_was_is_zero() -> None:
    """A rate needs two samples: a series that begins with 1 has lost its first event."""
    got = samples(Metrics("m"))
    assert [got["evap_exchanges_total", (end,)] for end in ENDS] == [0] * len(ENDS)
    assert [got["vllm:request_success_total", (reason, "m")] for reason in REASONS] == [0] * len(REASONS)


def test_every_family_is_on_the_page() -> None:
    page = Metrics("m").render().decode()
    for name, family in FAMILIES.items():
        suffix = "_total" if family.kind == "counter" else ""
        assert f"# TYPE {name}{suffix} {family.kind}\n" in page


def test_vllms_buckets_are_some_of_ours() -> None:
    for name, (ours, bounds) in VLLM.items():
        if ours in FAMILIES:
            assert set(bounds) <= set(FAMILIES[ours].bounds), name


def test_no_client_can_make_a_series() -> None:
    metrics = Metrics("m")
    before = len(samples(metrics))
    for n in range(1000):
        metrics.settled(settled(status=400, end=f"made up {n}", reasons=()))
    got = samples(metrics)
    assert got["evap_exchanges_total", ("refused",)] == 1000
    assert len(got) == before + 1, "the status"


def test_gauges_are_read_when_scraped() -> None:
    metrics = Metrics("m")
    value = [1.0]
    metrics.gauge("running", "Generations", lambda: value[0])
    assert samples(metrics)["evap_running", ()] == 1
    value[0] = 2.0
    got = samples(metrics)
    assert got["evap_running", ()] == got["vllm:num_requests_running", ("m",)] == 2


def test_pages_add_up() -> None:
    """Of three processes: each number is the sum, and the least says whether all is well."""
    parts = [Metrics("m") for _ in range(3)]
    for n, part in enumerate(parts):
        part.gauge("running", "Generations", lambda n=n: n + 1.0)  # type: ignore[misc]
        part.gauge("ready", "1 if the engine is ready", lambda n=n: float(n != 1))  # type: ignore[misc]
        part.gauge("kv_cache_usage", "Share", lambda n=n: 0.1 * n)  # type: ignore[misc]
        part.counter("violations", "Connections closed", lambda: 5.0)
        for _ in range(n + 1):
            part.settled(settled(whole_s=0.01 * 10**n))
            part.live.counts["generated"] += 7
        for now in (0, 1_000_000, 3_000_000):
            part.live.gaps.note(np.array([0, 1], np.int32), now)
    others = [msgspec.json.decode(msgspec.json.encode(part.snapshot()), type=Snapshot) for part in parts[1:]]
    got = samples(parts[0], *others)
    assert got["evap_requests_total", ("200",)] == 6
    assert got["evap_tokens_total", ("emitted",)] == 36
    assert got["evap_generated_tokens_total", ()] == 42
    assert got["evap_running", ()] == got["vllm:num_requests_running", ("m",)] == 6
    assert got["evap_ready", ()] == 0
    assert got["vllm:kv_cache_usage_perc", ("m",)] == 0.2
    assert got["evap_violations_total", ()] == 15
    assert got["evap_request_duration_seconds_count", ()] == 6
    assert got["evap_request_duration_seconds_bucket", ("0.01",)] == 1
    assert got["evap_request_duration_seconds_bucket", ("0.1",)] == 3
    assert got["evap_inter_token_seconds_count", ()] == 12
    assert got["evap_inter_token_seconds_sum", ()] == pytest.approx(0.018)
    assert merged([part.snapshot() for part in parts]).values["evap_tokens"]["emitted"] == 36
