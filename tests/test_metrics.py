"""The metrics page: right sums, bounded labels, vLLM's names."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from evap.messages import Usage
from evap.metrics import ENDS, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(s.labels.values())): s.value for f in families for s in f.samples}


def test_sums_are_exact() -> None:
    metrics = Metrics("m")
    for _ in range(3):
        usage = Usage(prompt=10, cached=4, computed=7, emitted=6, delivered=5)
        metrics.settled(status=200, end="stop", usage=usage, first_s=0.1, whole_s=0.2)
    metrics.answered(404)
    got = samples(metrics)
    assert got["evap_requests_total", ("200",)] == 3
    assert got["evap_requests_total", ("404",)] == 1
    assert [got["evap_tokens_total", (k,)] for k in ("prompt", "cached", "computed", "emitted", "delivered")] == [
        30, 12, 21, 18, 15,
    ]  # fmt: skip
    assert got["vllm:prompt_tokens_total", ("m",)] == 30
    assert got["vllm:generation_tokens_total", ("m",)] == 18
    assert got["evap_request_duration_seconds_count", ()] == 3


def test_no_client_can_make_a_series() -> None:
    metrics = Metrics("m")
    for n in range(1000):
        metrics.settled(status=400, end=f"made up {n}", usage=Usage(), first_s=None, whole_s=0.0)
    ends = {labels for name, labels in samples(metrics) if name == "evap_exchanges_total"}
    assert ends == {("refused",)}
    assert "refused" in ENDS


def test_gauges_are_read_when_scraped() -> None:
    metrics = Metrics("m")
    value = [1.0]
    metrics.gauges["running"] = ("Generations", lambda: value[0])
    assert samples(metrics)["evap_running", ()] == 1
    value[0] = 2.0
    got = samples(metrics)
    assert got["evap_running", ()] == got["vllm:num_requests_running", ("m",)] == 2
