"""evap with vLLM behind it, over sockets: real weights, the OpenAI client, resets, and an engine that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h2.connection
import httpx
import psutil
import pytest

from tests.clients.asking import eventually, gauge
from tests.engine.vllm.live import NEEDS_VLLM, prepare_environment, serve
from tests.support import TIME_FACTOR, Server

pytestmark = NEEDS_VLLM

PATIENCE_S = 60.0 * TIME_FACTOR

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "million_people": {"type": "integer"}},
    "required": ["city", "million_people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def small(tiny: Path) -> Iterator[Server]:
    yield from serve(
        "--model", str(tiny), "--kv-cache-mb", "64", "--max-running", "64", "--vllm-arg", "max_num_batched_tokens=64",
        "--keepalive-comment-s", "0.2",
    )  # fmt: skip


def ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_paris_over_curl_and_http2(real: Server) -> None:
    body = json.dumps({"messages": ask("What is the capital of France?"), "temperature": 0, "max_tokens": 20})
    done = subprocess.run(
        ["curl", "-sS", "--http2-prior-knowledge", "-w", "\n%{http_version} %{http_code}", "-d", body,
         "-H", "content-type: application/json", f"{real.url}/v1/chat/completions"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    answer, _, status = done.stdout.rpartition("\n")
    assert status == "2 200"
    assert "Paris" in json.loads(answer)["choices"][0]["message"]["content"]


@pytest.fixture
def client(real: Server) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=120) as it:
        yield it


def model_of(client: Any) -> str:
    return str(client.models.list().data[0].id)


def test_openai_streams_what_it_gives_whole(client: Any) -> None:
    settings = {"model": model_of(client), "messages": ask("Name three colours."), "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_openai_parameters(client: Any) -> None:
    answer = client.chat.completions.create(
        model=model_of(client), messages=ask("Say something."), n=4, temperature=1.0, seed=5, top_p=0.9,
        presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"5": -100}, stop=["\n\n"], max_completion_tokens=12,
        logprobs=True, top_logprobs=3, user="me", extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
    )  # fmt: skip
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert len({c.message.content for c in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.logprobs.content
        for entry in choice.logprobs.content:
            assert bytes(entry.bytes).decode(errors="replace") == entry.token
            assert len(entry.top_logprobs) == 3
    assert answer.usage.completion_tokens <= 48


def test_openai_json_schema_validates(client: Any) -> None:
    answer = client.chat.completions.create(
        model=model_of(client), messages=ask("Tell me of a large city, as JSON."), temperature=0, max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}},
    )  # fmt: skip
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"city", "million_people"}
    assert isinstance(found["city"], str)
    assert isinstance(found["million_people"], int)


@pytest.mark.parametrize(
    ("extra", "texts"),
    [
        ({"guided_choice": ["red", "green"]}, {"red", "green"}),
        ({"structured_outputs": {"regex": "(yes|no)!"}}, {"yes!", "no!"}),
        ({"guided_grammar": 'root ::= "a" | "b"'}, {"a", "b"}),
    ],
)
def test_vllms_own_constraints(client: Any, extra: dict[str, Any], texts: set[str]) -> None:
    answer = client.completions.create(
        model=model_of(client), prompt="My answer is: ", temperature=0, max_tokens=8, extra_body=extra
    )
    assert answer.choices[0].text in texts


def test_an_echo_with_logprobs(client: Any) -> None:
    answer = client.completions.create(
        model=model_of(client), prompt="The capital of France is", temperature=0, max_tokens=2, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text.startswith("The capital of France is")
    assert choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs[1:])


def test_a_reset_during_a_long_prefill_frees_the_engine(small: Server) -> None:
    """A slot counts as running until the engine has confirmed that it dropped the request."""
    prompt = list(range(2, 1902))  # thirty steps of prefill
    with httpx.Client(http1=False, http2=True, timeout=60) as http:
        for _ in range(5):
            body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True}
            with http.stream("POST", f"{small.url}/v1/completions", json=body) as answer:
                assert answer.status_code == 200
            eventually(lambda: gauge(small, "evap_running") == 0, "the engine is free", PATIENCE_S)
        body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
        assert http.post(f"{small.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3


def test_refusals_reach_the_client_with_their_field(small: Server) -> None:
    for fields, param in (
        ({"guided_regex": "(unclosed"}, None),
        ({"allowed_token_ids": [999_999]}, "allowed_token_ids"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}},
            "response_format",
        ),
    ):
        answer = httpx.post(f"{small.url}/v1/completions", json={"prompt": "x", "max_tokens": 2, **fields})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert param is None or error["param"] == param


def engine_core(server: Server) -> psutil.Process:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    found = [p for p in processes if "EngineCore" in p.name() or "EngineCore" in " ".join(p.cmdline())]
    assert found, [(p.name(), p.cmdline()) for p in processes]
    return found[0]


class Streams:
    """Streamed requests, each on a connection of its own, read by one thread: a client that costs next to nothing, so
    that all of them are under way before the first has ended."""

    def __init__(self, server: Server, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self.texts = [b""] * count
        for n in range(count):
            body = json.dumps({"prompt": [n + 2, 9], "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            sock.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            self._selector.register(sock, selectors.EVENT_READ, n)

    def read(self, until: Callable[[], bool], seconds: float = 120.0) -> None:
        """Read until `until` says so, or all have ended. Raises AssertionError when that takes too long."""
        deadline = time.monotonic() + seconds
        while self._selector.get_map() and not until():
            assert time.monotonic() < deadline, [text[-200:] for text in self.texts]
            for key, _ in self._selector.select(1.0):
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 16)
                self.texts[key.data] += data
                if not data:
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()

    def begun(self) -> bool:
        return all(b'"text"' in text for text in self.texts)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()


def test_a_killed_engine_ends_its_streams_and_comes_back(small: Server) -> None:
    core = engine_core(small)
    for _ in range(4):
        streams = Streams(small, 50)
        streams.read(streams.begun)
        if not any(b"[DONE]" in text for text in streams.texts):
            break
        streams.close()  # this process was held up for so long that one has had all its 4,000 tokens meanwhile
    core.kill()
    streams.read(lambda: False)
    eventually(lambda: httpx.get(f"{small.url}/ready").status_code == 503, "it is not ready", PATIENCE_S)
    for text in streams.texts:
        events = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: {")]
        assert events[-1].get("error", {}).get("code") == "engine_failed", text[-600:]
        assert "data: [DONE]" in text.decode()[-100:]
    refused = httpx.post(f"{small.url}/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert httpx.get(f"{small.url}/health").status_code == 200
    eventually(lambda: httpx.get(f"{small.url}/ready").status_code == 200, "it is ready again", 5 * PATIENCE_S)
    answer = httpx.post(f"{small.url}/v1/completions", json={"prompt": "x", "max_tokens": 4, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert gauge(small, "evap_engine_restarts_total") == 1
    assert gauge(small, "evap_engine_mismatches_total") == 0


class Resets:
    """Requests over HTTP/2 that are reset 0 to 5 ms after their headers, a connection for every 80 (what its budget of
    resets allows)."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._random = random.Random(3)

    def send(self, count: int) -> None:
        for start in range(0, count, 80):
            asyncio.run(self._connection(min(80, count - start)))

    async def _connection(self, count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        client = h2.connection.H2Connection()
        client.initiate_connection()
        writer.write(client.data_to_send())
        drain = asyncio.create_task(reader.read(-1))
        for _ in range(count):
            stream = client.get_next_available_stream_id()
            prompt = [self._random.randrange(2, 2000) for _ in range(200)]
            body = json.dumps({"prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
            client.send_headers(stream, [
                (":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/v1/completions"),
                ("content-type", "application/json"),
            ])  # fmt: skip
            client.send_data(stream, body, end_stream=True)
            writer.write(client.data_to_send())
            await asyncio.sleep(self._random.choice((0.0, 0.001, 0.005)))
            client.reset_stream(stream, error_code=8)
            client.outbound_flow_control_window = 1 << 20  # it never reads what the server says about windows
            writer.write(client.data_to_send())
        writer.close()
        drain.cancel()


def test_requests_reset_within_milliseconds_leave_nothing(small: Server) -> None:
    """EVAP_RESETS=10000 is the whole of it; the engine's own part of that many is in test_replica.py."""
    count = int(os.environ.get("EVAP_RESETS", "400"))
    resets, core = Resets(small), engine_core(small)
    own = psutil.Process(small.process.pid)
    resets.send(max(200, count // 5))
    eventually(lambda: gauge(small, "evap_open_exchanges") == 0, "all are settled", PATIENCE_S)
    before = own.memory_info().rss, core.memory_info().rss
    resets.send(count)
    eventually(lambda: gauge(small, "evap_open_exchanges") == 0, "all are settled", PATIENCE_S)
    assert gauge(small, "evap_running") == 0
    after = own.memory_info().rss, core.memory_info().rss
    assert all(b - a < 30 << 20 for a, b in zip(before, after, strict=True)), (before, after)
    body = {"prompt": list(range(2, 1902)), "max_tokens": 3, "ignore_eos": True}  # takes most of the KV blocks
    answer = httpx.post(f"{small.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_the_engine_does_not_outlive_a_killed_server(tiny: Path) -> None:
    """Nobody is left to stop it, and it would keep its memory."""
    prepare_environment()
    server = Server("--engine", "vllm", "--port", "0", "--enforce-eager", "--model", str(tiny), "--kv-cache-mb", "16")
    try:
        server.wait_ready(600)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) >= 2
        server.process.kill()
        _gone, alive = psutil.wait_procs(processes, timeout=30)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    finally:
        server.kill()
