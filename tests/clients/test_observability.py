"""What a server says of itself, against what its clients have seen: sums, spans, times, request ids."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.clients.asking import eventually, gauge, program, run
from tests.collector import Collector, frozen, plain
from tests.support import TIME_FACTOR, Server

CHAT = "/v1/chat/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TIMING = re.compile(r"queue;dur=(\S+), ttft;dur=(\S+), total;dur=([0-9.]+)(?:, traceparent;desc=\"(.*)\")?$")
VERSIONS = pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])


def client(server: Server, *, http2: bool) -> httpx.Client:
    return httpx.Client(base_url=server.url, http1=not http2, http2=http2, trust_env=False, timeout=60 * TIME_FACTOR)


def request(tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "canary:word please"}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, **more}


def page(server: Server) -> dict[tuple[str, tuple[str, ...]], float]:
    with client(server, http2=False) as http:
        text = http.get("/metrics").text
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(v for _, v in sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def settled(server: Server) -> None:
    eventually(lambda: gauge(server, "evap_open_exchanges") == 0, "exchanges are left over")


# The page


def _ask(server: Server, number: int) -> tuple[int, int]:
    """One of several kinds of requests; the prompt's and the answer's tokens, as the client was told and as it saw."""
    http2, stream, tokens = bool(number & 1), bool(number & 2), 3 + number % 50
    with client(server, http2=http2) as http:
        if not stream:
            usage = http.post(CHAT, json=request(tokens)).json()["usage"]
            return usage["prompt_tokens"], usage["completion_tokens"]
        body = http.post(CHAT, json=request(tokens, stream=True, stream_options={"include_usage": True})).text
    events = [json.loads(e.removeprefix("data: ")) for e in body.split("\n\n") if e.startswith("data: {")]
    seen = sum(len(c["delta"].get("content") or "") for e in events for c in e["choices"])
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == seen == tokens, "the engine says one character a token"
    return usage["prompt_tokens"], seen


def test_the_page_has_what_clients_counted(start_server: Callable[..., Server]) -> None:
    server = start_server("--synthetic-step-ms", "1")
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda number: _ask(server, number), range(80)))
    with client(server, http2=True) as http:
        assert http.post(CHAT, json={"messages": 5}).status_code == 400
        assert http.post("/nowhere", json={}).status_code == 404  # before its body came
        assert http.get("/health", headers={"x": "y" * 40_000}).status_code == 431
        with http.stream("POST", CHAT, json=request(100_000, stream=True)) as left:
            next(left.iter_lines())
    settled(server)
    got = page(server)
    prompt, answer = sum(p for p, _ in counts), sum(a for _, a in counts)
    computed = got["evap_tokens_total", ("computed",)]
    over = computed - answer  # of the stream that was left
    assert 0 <= over < 100_000
    per_prompt = prompt / len(counts)
    assert got["evap_tokens_total", ("prompt",)] == prompt + per_prompt
    assert answer <= got["evap_tokens_total", ("delivered",)] <= computed
    assert got["vllm:generation_tokens_total", ("synthetic",)] == got["evap_generated_tokens_total", ()] == computed
    assert got["vllm:request_success_total", ("length", "synthetic")] == got["evap_exchanges_total", ("length",)] == 80
    assert got["vllm:request_success_total", ("abort", "synthetic")] == 1
    assert got["evap_exchanges_total", ("client_reset",)] + got["evap_exchanges_total", ("client_gone",)] == 1
    assert [got["evap_requests_total", (status,)] for status in ("400", "404", "431")] == [1, 1, 1]
    assert got["vllm:e2e_request_latency_seconds_count", ("synthetic",)] == 80
    assert got["vllm:request_generation_tokens_sum", ("synthetic",)] == answer
    assert got["evap_time_to_first_token_seconds_count", ()] in (80, 81)
    gaps = got["vllm:inter_token_latency_seconds_count", ("synthetic",)]
    assert 0 < gaps <= computed - 80, "tokens that came together are one arrival"
    assert got["vllm:num_requests_running", ("synthetic",)] == got["vllm:num_requests_waiting", ("synthetic",)] == 0


# Spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    it = Collector()
    yield it
    it.close()


@VERSIONS
def test_a_span_for_each_request(start_server: Callable[..., Server], collector: Collector, http2: bool) -> None:
    server = start_server("--otel-endpoint", collector.url)
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "rojo=1"}
    with client(server, http2=http2) as http:
        whole = http.post(CHAT, json=request(7, n=2), headers=parent).json()
        http.post(CHAT, json=request(5, stream=True), headers={"traceparent": "malformed"})
        http.post(CHAT, json=request(5), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})  # not sampled
        http.post(CHAT, json=request(5, temperature=0), headers={"x-request-id": "last"})
    spans = [span for _, span in collector.wait(3)]
    assert len({span.trace_id for span in spans}) == 3
    span, broken, last = spans
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "rojo=1")
    assert broken.parent_span_id == b""
    found = plain(span.attributes)
    assert span.name == "chat synthetic"
    assert found["gen_ai.response.id"] == whole["id"]
    assert found["gen_ai.usage.input_tokens"] == whole["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == whole["usage"]["completion_tokens"] == 14
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert found["network.protocol.version"] == ("2" if http2 else "1.1")
    assert plain(last.attributes)["gen_ai.request.temperature"] == 0
    stamps = [span.start_time_unix_nano, *[event.time_unix_nano for event in span.events], span.end_time_unix_nano]
    assert stamps == sorted(stamps)
    assert [event.name for event in span.events] == ["submitted", "first token", "last token"]
    assert f"trace_id={TRACE}" in server.log
    assert not any("canary" in value for s in spans for value in map(str, plain(s.attributes).values()))
    eventually(lambda: gauge(server, "evap_spans_exported_total") == 3, "three spans are taken")


@pytest.mark.parametrize("how", ["frozen", "away"])
def test_no_collector_no_delay(start_server: Callable[..., Server], how: str) -> None:
    """Streams run to their end while the exporter hangs; the server ends with it, too."""
    listening = frozen()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    if how == "away":
        listening.close()
    server = start_server("--otel-endpoint", url, "--synthetic-step-ms", "0")
    with listening, client(server, http2=True) as http:
        for _ in range(5):
            assert http.post(CHAT, json=request(50, stream=True)).text.endswith("data: [DONE]\n\n")
        settled(server)
        assert gauge(server, "evap_spans_exported_total") == 0
        server.stop()


def test_an_unusable_endpoint_is_said_before_the_start() -> None:
    server = Server("--engine", "synthetic", "--port", "0", "--otel-endpoint", "collector:4317")
    assert server.process.wait(30 * TIME_FACTOR) == 2
    server.wait_log(r"error: --otel-endpoint collector:4317 is not")
    server.kill()


# server-timing


def _times(text: str) -> tuple[float, float, float]:
    match = TIMING.search(text)
    assert match, text
    return float(match[1]), float(match[2]), float(match[3])


@VERSIONS
def test_times_of_a_whole_answer_are_in_its_head(start_server: Callable[..., Server], http2: bool) -> None:
    server = start_server("--synthetic-ttft-ms", "30", "--synthetic-step-ms", "2")
    with client(server, http2=http2) as http:
        assert "server-timing" not in http.post(CHAT, json=request(3)).headers
        told = http.post(CHAT, json=request(11), headers={"evap-timing": "1"}).headers["server-timing"]
        assert "traceparent" not in told
        queue, first, total = _times(told)
        assert 0 <= queue < first
        assert first >= 29
        assert total >= first + 18
        parent = {"evap-timing": "1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        told = http.post(CHAT, json=request(3), headers=parent).headers["server-timing"]
        assert re.search(rf'traceparent;desc="00-{TRACE}-[0-9a-f]{{16}}-01"$', told)
        assert PARENT not in told


@VERSIONS
def test_times_of_a_stream_are_a_comment(server: Server, http2: bool) -> None:
    with client(server, http2=http2) as http:
        assert "server-timing" not in http.post(CHAT, json=request(3, stream=True)).text
        body = http.post(CHAT, json=request(3, stream=True), headers={"evap-timing": "1"}).text
    *_, comment, done, end = body.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert comment.startswith(": server-timing queue;dur=")
    _times(comment)


def test_times_of_a_stream_are_a_trailer_too(server: Server) -> None:
    command = [program("curl"), "-sN", "-i", "--http2-prior-knowledge", "-H", "te: trailers", "-H", "evap-timing: 1"]
    body = json.dumps(request(3, stream=True))
    out = run(*command, "-H", "content-type: application/json", "-d", body, server.url + CHAT).stdout.decode()
    head, _, rest = out.partition("\r\n\r\n")
    assert "server-timing" not in head
    trailers = rest.partition("data: [DONE]\n\n")[2]
    assert "evap-usage-emitted: 3" in trailers
    (line,) = [line for line in trailers.splitlines() if line.startswith("server-timing: ")]
    _times(line)


# X-Request-Id


@VERSIONS
def test_a_request_id_is_echoed_once_and_capped(server: Server, http2: bool) -> None:
    """Case: an id of a megabyte, repeated in each chunk, made 20 GB of egress."""
    with client(server, http2=http2) as http:
        long, longer = "i" * 128, "i" * 129
        answer = http.post(CHAT, json=request(50, stream=True), headers={"x-request-id": long})
        assert answer.headers["x-request-id"] == long
        assert long not in answer.text
        answer = http.post(CHAT, json=request(5), headers={"x-request-id": "mine"})
        assert (answer.headers["x-request-id"], "mine" in answer.text) == ("mine", False)
        answer = http.post(CHAT, json=request(10**9), headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")
        answer = http.post("/nowhere", json={}, headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (404, "mine")
        answer = http.post(CHAT, json=request(50, stream=True), headers={"x-request-id": longer})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")
        assert longer not in answer.text
        assert "x-request-id" not in answer.headers
        huge = "i" * (40_000 if http2 else 1_000_000)  # hpack's own encoder needs minutes for more
        try:
            assert http.post(CHAT, json=request(5), headers={"x-request-id": huge}).status_code == 431
        except httpx.TransportError:  # or the connection, which did not stop at its limit, is closed
            assert http2
    assert gauge(server, "evap_ready") == 1


def test_one_id_for_many_requests_mixes_nothing(server: Server) -> None:
    """It is no key: requests that share one run side by side, each with its own answer and its own id."""
    ids, lock = set(), threading.Lock()

    def ask(number: int) -> None:
        with client(server, http2=True) as http:
            body = request(20 + number)
            answer = http.post(CHAT, json=body, headers={"x-request-id": "the same"}).json()
        assert answer["usage"]["completion_tokens"] == 20 + number
        with lock:
            ids.add(answer["id"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(16)))
    assert len(ids) == 16
