"""`/metrics`: what a process did, in Prometheus' text format.

Nothing is updated per token: per engine step two numbers are noted, per exchange a few, and everything else is read
when somebody scrapes. Names are `evap_*`; where vLLM has a metric of the same meaning its name is served too, so that
dashboards made for it work (`VLLM`, from vllm/v1/metrics/loggers.py of 0.32).

Everything that is counted is a `Snapshot`, and snapshots add up: several processes make one page, with exact sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from evap import exposition
from evap.histogram import Gaps
from evap.messages import Usage
from evap.snapshot import Snapshot, merged, of_python
from evap.tally import Numbers, Plain

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

# Upper bounds in seconds and in tokens. Each list has all of vLLM's of the same meaning in it.
FIRST: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
)  # fmt: skip
GAP: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
    40, 80,
)  # fmt: skip
WHOLE: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680,
)  # fmt: skip
TOKENS: Final = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
CHOICES: Final = (1, 2, 5, 10, 20)

#: Why an exchange ended, as a label: a closed list, so that no client can make new series.
ENDS: Final = frozenset((
    "stop", "length", "budget", "client_reset", "client_gone", "stalled", "protocol_error", "drain", "draining",
    "engine_failed", "deadline_exceeded", "ttft_timeout", "internal_error", "refused", "interrupted",
))  # fmt: skip
#: Why a generation ended, in vLLM's words.
REASONS: Final = ("stop", "length", "abort", "error")
USAGE_FIELDS: Final = ("prompt", "cached", "computed", "emitted", "delivered")


class Family(NamedTuple):
    """kind: "counter" | "gauge" | "histogram". label: its one label, or "". bounds: of histograms."""

    kind: str
    help: str
    label: str = ""
    bounds: tuple[float, ...] = ()


#: What evap counts of itself. Others are added with `gauge` and `counter`.
FAMILIES: Final[dict[str, Family]] = {
    "evap_requests": Family("counter", "Requests answered, by status", "status"),
    "evap_exchanges": Family("counter", "Exchanges settled, by why they ended", "end"),
    "evap_tokens": Family("counter", "Tokens of settled exchanges, by what was counted", "kind"),
    "evap_choices": Family("counter", "Generations ended, by why", "reason"),
    "evap_limit": Family("counter", "What a limit has refused, ended, closed or made to wait, by limit", "limit"),
    "evap_generated_tokens": Family("counter", "Tokens that engines have given, as they come"),
    "evap_started_prompt_tokens": Family("counter", "Prompt tokens of exchanges that have their first token"),
    "evap_started_cached_tokens": Family("counter", "Of those, tokens found in the prefix cache"),
    "evap_time_to_first_token_seconds": Family("histogram", "From the whole request to its first token", "", FIRST),
    "evap_inter_token_seconds": Family("histogram", "Between a generation's tokens, as they reach evap", "", GAP),
    "evap_token_seconds": Family("histogram", "Mean time between an answer's tokens, by answer", "", GAP),
    "evap_request_queue_seconds": Family("histogram", "From the whole request to the engine", "", WHOLE),
    "evap_request_prefill_seconds": Family("histogram", "From the engine to the first token", "", WHOLE),
    "evap_request_decode_seconds": Family("histogram", "From the first token to the last", "", WHOLE),
    "evap_request_inference_seconds": Family("histogram", "From the engine to the last token", "", WHOLE),
    "evap_request_duration_seconds": Family("histogram", "From the whole request to settled, if complete", "", WHOLE),
    "evap_request_prompt_tokens": Family("histogram", "Tokens of a prompt", "", TOKENS),
    "evap_choice_tokens": Family("histogram", "Tokens of a choice", "", TOKENS),
    "evap_longest_choice_tokens": Family("histogram", "Tokens of a request's longest choice", "", TOKENS),
    "evap_request_max_tokens": Family("histogram", "max_tokens, where a request has it", "", TOKENS),
    "evap_request_choices": Family("histogram", "Choices that a request asks for", "", CHOICES),
}  # fmt: skip

_LATENCY: Final = WHOLE[6:]  # vLLM's begins at 0.3 s
_FIRST: Final = tuple(b for b in FIRST if b != 0.002)
#: vLLM's name -> (ours, vLLM's bounds). Labels: model_name, and vLLM's finished_reason.
VLLM: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "num_requests_running": ("evap_running", ()),
    "num_requests_waiting": ("evap_waiting", ()),
    "kv_cache_usage_perc": ("evap_kv_cache_usage", ()),
    "prompt_tokens": ("evap_started_prompt_tokens", ()),
    "prompt_tokens_cached": ("evap_started_cached_tokens", ()),
    "prefix_cache_queries": ("evap_started_prompt_tokens", ()),
    "prefix_cache_hits": ("evap_started_cached_tokens", ()),
    "generation_tokens": ("evap_generated_tokens", ()),
    "request_success": ("evap_choices", ()),
    "time_to_first_token_seconds": ("evap_time_to_first_token_seconds", _FIRST),
    "inter_token_latency_seconds": ("evap_inter_token_seconds", GAP[4:]),
    "request_time_per_output_token_seconds": ("evap_token_seconds", GAP[4:]),
    "request_queue_time_seconds": ("evap_request_queue_seconds", _LATENCY),
    "request_prefill_time_seconds": ("evap_request_prefill_seconds", _LATENCY),
    "request_inference_time_seconds": ("evap_request_inference_seconds", _LATENCY),
    "request_decode_time_seconds": ("evap_request_decode_seconds", _LATENCY),
    "e2e_request_latency_seconds": ("evap_request_duration_seconds", _LATENCY),
    "request_prompt_tokens": ("evap_request_prompt_tokens", TOKENS),
    "request_generation_tokens": ("evap_choice_tokens", TOKENS),
    "request_max_num_generation_tokens": ("evap_longest_choice_tokens", TOKENS),
    "request_params_max_tokens": ("evap_request_max_tokens", TOKENS),
    "request_params_n": ("evap_request_choices", CHOICES),
}
#: Where numbers of other parts of a process are kept with its own: limits (of requests, of the wire), and counters.
LIMITS: Final = ("limits", "wire limits")
WIRE: Final = "wire"
_COMPLETE: Final = frozenset(("stop", "length", "budget"))


def left_in(numbers: Numbers) -> Snapshot:
    """What a process had counted that is dead. numbers: those that it was given."""
    it = Metrics("", 1, numbers)
    it.limits += [numbers.counts(family) for family in LIMITS]
    found = it.snapshot()
    found.values |= {f"evap_{name}": {"": float(n)} for name, n in numbers.counts(WIRE).items()}
    return found


class Live:
    """What is noted while exchanges run. Fed by `steps.py`: at each engine step, and at an exchange's first token."""

    __slots__ = ("counts", "first", "gaps")

    def __init__(self, slots: int = 1 << 16, numbers: Numbers | None = None) -> None:
        numbers = numbers or Plain()
        self.counts = numbers.counts("live", ("generated", "prompt", "cached"))
        self.first = numbers.histogram(FIRST)
        self.gaps = Gaps(slots, numbers.histogram(GAP))

    def started(self, prompt: int, cached: int, first_s: float) -> None:
        """An exchange has its first token."""
        self.counts["prompt"] += prompt
        self.counts["cached"] += cached
        self.first.observe(first_s)


class Settled(NamedTuple):
    """An exchange that is over. reasons: why each choice ended, if the engine heard of it. lengths: tokens of each.
    Times are None for what did not happen. queue_s: until the engine had it; prefill_s: from there to the first token;
    decode_s: from there to the last."""

    status: int
    end: str
    usage: Usage
    reasons: Sequence[str] = ()
    lengths: Sequence[int] = ()
    max_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    whole_s: float = 0.0


class Metrics:
    """Counters of one process, and the registry that serves them. numbers: where they are."""

    def __init__(self, model: str, slots: int = 1 << 16, numbers: Numbers | None = None) -> None:
        numbers = numbers or Plain()
        self.live = Live(slots, numbers)
        self.ends = numbers.counts("ends", sorted(ENDS))
        self.statuses = numbers.counts("statuses")
        self.reasons = numbers.counts("reasons", REASONS)
        self.tokens = numbers.counts("tokens", USAGE_FIELDS)
        live = {
            "evap_time_to_first_token_seconds": self.live.first,
            "evap_inter_token_seconds": self.live.gaps.histogram,
        }
        self.histograms = live | {
            name: numbers.histogram(f.bounds)
            for name, f in FAMILIES.items() if f.kind == "histogram" and name not in live
        }  # fmt: skip
        #: limit -> how often; what several say of one limit is added
        self.limits: list[Mapping[str, int]] = []
        self._read: dict[str, tuple[Family, Callable[[], float]]] = {}
        self._model = model
        #: of an engine that several processes share: none of them knows how many of its generations run
        self.running_limit: int | None = None
        self._python: Callable[[], Snapshot] | None = None
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    # Counting

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Serve `evap_{name}`, read at each scrape."""
        self._read[f"evap_{name}"] = (Family("gauge", help), read)

    def counter(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Serve `evap_{name}_total`, read at each scrape; it must never fall."""
        self._read[f"evap_{name}"] = (Family("counter", help), read)

    def be_one_of_several(self) -> None:
        """Their parent says what the system says of each, and how many records the ledger got from all."""
        self._read.pop("evap_ledger_records", None)
        self.registry = CollectorRegistry()
        PlatformCollector(registry=self.registry)
        self._python = of_python

    def answered(self, status: int) -> None:
        """A request that made no exchange (models, health, refused before a prompt was read)."""
        self.statuses[str(status)] = self.statuses.get(str(status), 0) + 1

    def settled(self, it: Settled) -> None:
        """One exchange is over; its account is final."""
        self.answered(it.status)
        end = it.end if it.end in ENDS else "refused"
        self.ends[end] += 1
        for name in USAGE_FIELDS:
            self.tokens[name] += getattr(it.usage, name)
        for reason in it.reasons:
            self.reasons[reason] += 1
        if end in _COMPLETE:
            self._complete(it)

    def _complete(self, it: Settled) -> None:
        found = self.histograms
        found["evap_request_duration_seconds"].observe(it.whole_s)
        found["evap_request_prompt_tokens"].observe(it.usage.prompt)
        found["evap_request_choices"].observe(len(it.lengths))
        if it.queue_s is not None:
            found["evap_request_queue_seconds"].observe(it.queue_s)
        if it.max_tokens is not None:
            found["evap_request_max_tokens"].observe(it.max_tokens)
        longest = 0
        for length in it.lengths:
            found["evap_choice_tokens"].observe(length)
            longest = max(longest, length)
        found["evap_longest_choice_tokens"].observe(longest)
        if it.decode_s is not None and it.prefill_s is not None:
            found["evap_request_prefill_seconds"].observe(it.prefill_s)
            found["evap_request_inference_seconds"].observe(it.prefill_s + it.decode_s)
            found["evap_request_decode_seconds"].observe(it.decode_s)
            if longest > 1:
                found["evap_token_seconds"].observe(it.decode_s / (longest - 1))

    # Serving

    def snapshot(self) -> Snapshot:
        """All numbers as of now."""
        live = self.live.counts
        self.live.gaps.fold()
        for histogram in self.histograms.values():
            histogram.fold()
        limits: Counter[str] = Counter()
        for counts in self.limits:
            limits.update(counts)
        values: dict[str, dict[str, float]] = {
            "evap_limit": dict(limits),
            "evap_requests": dict(self.statuses),
            "evap_exchanges": dict(self.ends),
            "evap_tokens": dict(self.tokens),
            "evap_choices": dict(self.reasons),
            "evap_generated_tokens": {"": live["generated"]},
            "evap_started_prompt_tokens": {"": live["prompt"]},
            "evap_started_cached_tokens": {"": live["cached"]},
        }
        for name, (_, read) in self._read.items():
            values[name] = {"": read()}
        own = Snapshot(
            values,
            {name: (h.counts.tolist(), h.total) for name, h in self.histograms.items()},
            {name: (family.kind, family.help, "") for name, (family, _) in self._read.items()},
        )
        return own if self._python is None else merged([own, self._python()])

    def render(self, others: Sequence[Snapshot] = ()) -> bytes:
        """The page. others: snapshots of the other processes that serve the same port."""
        whole = merged([self.snapshot(), *others])
        if self.running_limit is not None:
            busy = whole.values["evap_running"][""] + whole.values["evap_waiting"][""]
            running = min(busy, float(self.running_limit))
            whole.values |= {"evap_running": {"": running}, "evap_waiting": {"": busy - running}}
        lines = page(whole, self._model)
        lines.append("")
        return "\n".join(lines).encode() + generate_latest(self.registry)


def page(whole: Snapshot, model: str) -> list[str]:
    """Lines of the page, evap's names first."""
    families = FAMILIES | {name: Family(*text) for name, text in whole.families.items()}
    lines = [line for name, it in families.items() for line in _lines(whole, name, name, it, it.bounds, {})]
    for name, (ours, bounds) in VLLM.items():
        if ours in families:
            kind, _, label, all_bounds = families[ours]
            same = Family(kind, f"As vLLM counts it: {ours}", "finished_reason" if label else "", all_bounds)
            lines += _lines(whole, f"vllm:{name}", ours, same, bounds, {"model_name": model})
    return lines


def _lines(
    whole: Snapshot, name: str, ours: str, it: Family, bounds: Sequence[float], own: Mapping[str, str]
) -> list[str]:
    if it.kind != "histogram":
        return exposition.family(name, it.kind, it.help, it.label, whole.values.get(ours, {}), own)
    counts, total = whole.histograms[ours]
    return exposition.histogram(name, it.help, it.bounds, counts, total, bounds, own)
