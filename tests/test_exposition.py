"""The text format: what prometheus_client writes of the same numbers, and its parser reads back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from evap import exposition


def theirs(metric: Metric) -> list[tuple[str, dict[str, str], float]]:
    class Collector:
        def collect(self) -> list[Metric]:
            return [metric]

        def describe(self) -> list[Metric]:
            return []

    registry = CollectorRegistry()
    registry.register(Collector())
    return read(generate_latest(registry).decode())


def read(text: str) -> list[tuple[str, dict[str, str], float]]:
    return [(s.name, s.labels, s.value) for f in text_string_to_metric_families(text) for s in f.samples]


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT, TEXT, st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 1 << 53))
def test_any_label_help_and_number_come_back(help: str, value: str, number: float, count: int) -> None:
    counter = CounterMetricFamily("x", help, labels=("model_name", "end"))
    counter.add_metric((value, "stop"), count)
    ours = exposition.family("x", "counter", help, "end", {"stop": count}, {"model_name": value})
    assert read("\n".join([*ours, ""])) == theirs(counter) == [("x_total", {"model_name": value, "end": "stop"}, count)]
    gauge = GaugeMetricFamily("x", help)
    gauge.add_metric((), number)
    ours = exposition.family("x", "gauge", help, "", {"": number}, {})
    assert read("\n".join([*ours, ""])) == theirs(gauge) == [("x", {}, number)]


def test_a_histogram_is_cumulative_and_may_leave_bounds_out() -> None:
    metric = HistogramMetricFamily("x", "help", labels=("model_name",))
    metric.add_metric(("m",), [("0.5", 3.0), ("2.0", 9.0), ("+Inf", 16.0)], 12.5)
    ours = exposition.histogram("x", "help", (0.5, 1, 2), (3, 2, 4, 7), 12.5, (0.5, 2), {"model_name": "m"})
    found, expected = read("\n".join([*ours, ""])), theirs(metric)
    assert all(sample in found for sample in expected)
    assert len(found) == len(expected)
    bare = exposition.histogram("x", "help", (0.5,), (3, 2), 1.0, (), {})
    assert bare[2:] == ['x_bucket{le="+Inf"} 5', "x_count 5", "x_sum 1.0"]
