"""What is said of a server: numbers for `/metrics`, and of each exchange that is over its share of them and a log line.

Called on the loop's thread, once for each exchange and never for a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import UNSET

from evap import logs
from evap.config import EngineConfig
from evap.dispatch import Dispatch
from evap.exchange import Exchange
from evap.messages import ReplicaState
from evap.metrics import Metrics, Settled
from evap.protocol.limits import Shared
from evap.tracing import Ended, Tracer, sampled

logger = logging.getLogger("evap.server")
#: path -> gen_ai.operation.name
OPERATIONS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
#: what an engine may count of itself
ENGINE_COUNTERS: Final = {
    "restarts": "Starts of an engine after it had died",
    "mismatches": "Requests whose tokens differ from what the engine itself says of them",
}


class Observer:
    """One per process."""

    def __init__(
        self, metrics: Metrics, *, model: str, now_ns: Callable[[], int], wall_s: Callable[[], float],
        log_requests: bool = True, tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        self._metrics = metrics
        self._model = model
        self._now_ns, self._wall_s = now_ns, wall_s
        self._tracer = tracer
        self._log = log_requests and logger.isEnabledFor(logging.INFO)

    def settled(self, exchange: Exchange) -> None:
        """An exchange is over, and its account is final."""
        now_ns = self._now_ns()
        self._metrics.settled(summary(exchange, now_ns))
        if self._log or (failed(exchange) and logger.isEnabledFor(logging.WARNING)):
            logs.log_exchange(line(exchange, self._model, now_ns), self._wall_s())
        if self._tracer is not None and sampled(exchange.trace):
            self._tracer.put(span(exchange, self._model, now_ns, int(self._wall_s() * 1e9) - now_ns))
        exchange.part()


def failed(exchange: Exchange) -> bool:
    """By the server's fault, whether its answer had begun or not."""
    return exchange.status >= 500 or exchange.end in logs.FAULTS


def summary(exchange: Exchange, now_ns: int) -> Settled:
    """An exchange as numbers."""
    opened, submitted, first, last = exchange.opened_ns, exchange.submitted_ns, exchange.first_ns, exchange.last_ns
    without = "error" if failed(exchange) else "abort"
    return Settled(
        status=exchange.status or 499, end=exchange.ending, usage=exchange.account.usage,
        reasons=[choice.reason or without for choice in exchange.choices],
        lengths=[choice.emitted for choice in exchange.choices], max_tokens=exchange.request.max_tokens,
        queue_s=(submitted - opened) / 1e9 if submitted else None,
        prefill_s=(first - submitted) / 1e9 if first else None,
        decode_s=(last - first) / 1e9 if first and last else None, whole_s=(now_ns - opened) / 1e9,
    )  # fmt: skip


def line(exchange: Exchange, model: str, now_ns: int) -> logs.Exchange:
    """What the log says of an exchange: never its text."""
    usage, head, opened = exchange.account.usage, exchange.head, exchange.opened_ns
    request_id = head.get(b"x-request-id")
    return logs.Exchange(
        id=exchange.renderer.id, request_id=request_id.decode("latin-1") if request_id is not None else UNSET,
        trace_id=exchange.trace.trace_id if exchange.trace is not None else UNSET,
        key_id=exchange.account.key_id or UNSET, model=exchange.adapter or model, method=head.method, path=head.path,
        version=head.version, peer=head.peer, stream=exchange.request.stream, choices=len(exchange.choices),
        status=exchange.status or 499, end=exchange.ending, prompt_tokens=usage.prompt, cached_tokens=usage.cached,
        computed_tokens=usage.computed, emitted_tokens=usage.emitted, delivered_tokens=usage.delivered,
        queue_ms=_ms(exchange.submitted_ns - opened) if exchange.submitted_ns else UNSET,
        ttft_ms=_ms(exchange.first_ns - opened) if exchange.first_ns else UNSET, total_ms=_ms(now_ns - opened),
    )  # fmt: skip


def span(exchange: Exchange, model: str, now_ns: int, wall_offset_ns: int) -> Ended:
    """An exchange as OpenTelemetry's semantic conventions have it, for HTTP servers and for generative AI."""
    assert exchange.trace is not None
    head, usage, sampling, request = exchange.head, exchange.account.usage, exchange.sampling, exchange.request
    name, broken = exchange.adapter or model, failed(exchange)
    operation = OPERATIONS.get(head.path, "chat")
    optional = {
        "gen_ai.request.max_tokens": request.max_tokens, "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.top_k": sampling.top_k or None, "gen_ai.request.stop_sequences": request.stop or None,
        "gen_ai.request.choice.count": request.n if request.n != 1 else None,
        "gen_ai.response.time_to_first_chunk":
            (exchange.first_ns - exchange.opened_ns) / 1e9 if exchange.first_ns else None,
        "evap.key.id": exchange.account.key_id or None, "error.type": exchange.ending if broken else None,
    }  # fmt: skip
    stamps = (("submitted", exchange.submitted_ns), ("first token", exchange.first_ns),
              ("last token", exchange.last_ns))  # fmt: skip
    return Ended(
        context=exchange.trace, name=f"{operation} {name}", start_ns=exchange.opened_ns + wall_offset_ns,
        end_ns=now_ns + wall_offset_ns, failed=broken,
        events=[(event, at_ns + wall_offset_ns) for event, at_ns in stamps if at_ns],
        attributes={
            "http.request.method": head.method, "http.route": head.path, "url.path": head.path,
            "url.scheme": head.scheme, "http.response.status_code": exchange.status or 499,
            "network.protocol.name": "http", "network.protocol.version": head.version, "client.address": head.peer,
            "gen_ai.operation.name": operation, "gen_ai.provider.name": "evap", "gen_ai.request.model": name,
            "gen_ai.request.stream": request.stream, "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p, "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.response.id": exchange.renderer.id, "gen_ai.response.model": name,
            "gen_ai.response.finish_reasons": [c.reason or exchange.ending for c in exchange.choices],
            "gen_ai.usage.input_tokens": usage.prompt, "gen_ai.usage.output_tokens": usage.emitted,
            "gen_ai.usage.cache_read.input_tokens": usage.cached, "evap.usage.computed_tokens": usage.computed,
            "evap.usage.delivered_tokens": usage.delivered, "evap.end": exchange.ending,
            **{key: value for key, value in optional.items() if value is not None},
        },
    )  # fmt: skip


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


def watch(
    metrics: Metrics, dispatch: Dispatch, shared: Shared, engine: EngineConfig, tracer: Tracer | None = None
) -> None:
    """Gauges and counters that are read at each scrape."""

    gauge, counter, replica = metrics.gauge, metrics.counter, dispatch.replica

    def busy() -> float:
        return float(dispatch.steps.slots.size - dispatch.steps.slots.free)

    def runs() -> float:
        return float(replica.info.max_running if replica.state is ReplicaState.READY else engine.max_running)

    def waiting() -> float:
        return max(0.0, busy() - runs()) + len(dispatch.room.line)

    gauge("open_exchanges", "Requests that are not settled", lambda: float(len(dispatch.open)))
    gauge("running", "Generations in the engine", lambda: min(busy(), runs()))
    gauge("waiting", "Requests that wait for a place in the engine", waiting)
    gauge("waiting_tokens", "Prompt tokens of these, estimated", lambda: float(dispatch.room.line.tokens))
    gauge("connections", "Open connections", lambda: float(shared.connections))
    gauge("body_bytes", "Request bytes held", lambda: float(shared.body_bytes))
    large = dispatch.large
    gauge("large_requests", "Large requests on their way to tokens", lambda: float(large.jobs if large else 0))
    gauge("ready", "1 if the engine is ready", lambda: float(replica.state is ReplicaState.READY))
    metrics.limits += (dispatch.limits, shared.limits)
    counter("violations", "Connections closed for breaking the protocol", lambda: float(shared.counts["violations"]))
    counter("pushed", "Answers that were pushed", lambda: float(shared.counts["pushed"]))
    counter("push_refused", "Pushed answers that the client reset", lambda: float(shared.counts["push_refused"]))
    gauge("push_kept_bytes", "Bytes of pushed answers that can be fetched again", lambda: float(dispatch.blocks.size))
    counter("log_lines_dropped", "Log lines that nobody read in time", lambda: float(logs.dropped()))
    if tracer is not None:
        counter("spans_exported", "Spans that the collector has taken", lambda: float(tracer.exported))
        counter("spans_dropped", "Spans that no collector has taken in time", lambda: float(tracer.dropped))
    if hasattr(replica, "kv_usage"):
        gauge("kv_cache_usage", "Share of the KV cache that generations hold", partial(_number, replica, "kv_usage"))
    for name, text in ENGINE_COUNTERS.items():
        if hasattr(replica, name):
            counter(f"engine_{name}", text, partial(_number, replica, name))
    for name, (text, read) in dispatch.accounting.gauges().items():
        gauge(name, text, read)
    for name, (text, read) in dispatch.accounting.counters().items():
        counter(name, text, read)


def _number(owner: object, name: str) -> float:
    return float(getattr(owner, name))
