"""`/metrics`: what a process did, in Prometheus' text format.

Nothing is updated per token. Per exchange a few integers are added when it is settled; everything else is read when
somebody scrapes. Names are `evap_*`; where vLLM has a metric of the same meaning its name is served too, so that
dashboards made for it work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from evap.messages import Usage

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
#: observations kept before they are folded into the histograms
FOLD: Final = 1000
#: Why an exchange ended, as a label: a closed list, so that no client can make new series.
ENDS: Final = frozenset(
    ("stop", "length", "client_reset", "client_gone", "stalled", "protocol_error", "drain", "engine_failed", "refused")
)
USAGE_FIELDS: Final = ("prompt", "cached", "computed", "emitted", "delivered")


class Metrics:
    """Counters of one process, and the registry that serves them.

    gauges: name -> (help, function) read at each scrape; names without the `evap_` prefix.
    """

    def __init__(self, model: str) -> None:
        self.ends: dict[str, int] = {}
        self.statuses: dict[int, int] = {}
        self.tokens = dict.fromkeys(USAGE_FIELDS, 0)
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self.counters: dict[str, tuple[str, Callable[[], float]]] = {}
        self._model = model
        self._firsts: list[float] = []
        self._wholes: list[float] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._first = Histogram(
            "evap_time_to_first_token_seconds", "Request to first token", registry=self.registry, buckets=SECONDS
        )
        self._whole = Histogram(
            "evap_request_duration_seconds", "Request to settled", registry=self.registry, buckets=SECONDS
        )

    def answered(self, status: int) -> None:
        """A request that made no exchange (models, health, refused before a prompt was read)."""
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def settled(self, *, status: int, end: str, usage: Usage, first_s: float | None, whole_s: float) -> None:
        """One exchange is over; its account is final."""
        self.answered(status)
        end = end if end in ENDS else "refused"
        self.ends[end] = self.ends.get(end, 0) + 1
        for name in USAGE_FIELDS:
            self.tokens[name] += getattr(usage, name)
        if first_s is not None:
            self._firsts.append(first_s)
        self._wholes.append(whole_s)
        if len(self._wholes) >= FOLD:
            self._fold()

    def _fold(self) -> None:
        """Observations become histograms when somebody looks, or when there are many: that is cheaper by far."""
        for histogram, values in ((self._first, self._firsts), (self._whole, self._wholes)):
            for value in values:
                histogram.observe(value)
            values.clear()

    def collect(self) -> Iterable[Metric]:
        """prometheus_client's collector protocol."""
        yield _by_label("evap_requests", "Requests answered, by status", "status", self.statuses)
        yield _by_label("evap_exchanges", "Exchanges settled, by why they ended", "end", self.ends)
        yield _by_label("evap_tokens", "Tokens, by what was counted", "kind", self.tokens)
        for name, (text, read) in self.gauges.items():
            gauge = GaugeMetricFamily(f"evap_{name}", text)
            gauge.add_metric((), read())
            yield gauge
        for name, (text, read) in self.counters.items():
            counter = CounterMetricFamily(f"evap_{name}", text)
            counter.add_metric((), read())
            yield counter
        yield from self._as_vllm()

    def _as_vllm(self) -> Iterable[Metric]:
        counters = (("prompt_tokens", self.tokens["prompt"]), ("generation_tokens", self.tokens["emitted"]))
        for name, value in counters:
            counter = CounterMetricFamily(f"vllm:{name}", "As vLLM counts it", labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
        for name, source in (("num_requests_running", "running"), ("num_requests_waiting", "waiting")):
            if source in self.gauges:
                gauge = GaugeMetricFamily(f"vllm:{name}", "As vLLM counts it", labels=("model_name",))
                gauge.add_metric((self._model,), self.gauges[source][1]())
                yield gauge

    def render(self) -> bytes:
        self._fold()
        return generate_latest(self.registry)


def _by_label(name: str, text: str, label: str, values: Mapping[str, int] | Mapping[int, int]) -> Metric:
    counter = CounterMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        counter.add_metric((str(key),), value)
    return counter
