"""evap with vLLM behind it, over sockets: real weights, the OpenAI client, resets, and an engine that is killed."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.vllm.live import NEEDS_VLLM, prepare_environment
from tests.support import Server

pytestmark = NEEDS_VLLM

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "million_people": {"type": "integer"}},
    "required": ["city", "million_people"],
    "additionalProperties": False,
}


def serve(*args: str) -> Iterator[Server]:
    prepare_environment()
    server = Server("--engine", "vllm", "--port", "0", "--enforce-eager", *args)
    try:
        server.wait_ready(300)
        yield server
        assert server.stop(60) == 0, server.log
        server.check_log()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    """SmolLM2, the built-in model."""
    yield from serve("--max-model-len", "2048", "--kv-cache-mb", "256")


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


def gauge(server: Server, name: str) -> float:
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith(f"evap_{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no gauge {name}")


def until(what: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    waited = threading.Event()
    while not what():
        if time.monotonic() > deadline:
            return False
        waited.wait(0.02)
    return True


def test_a_reset_during_a_long_prefill_frees_the_engine(small: Server) -> None:
    """A slot counts as running until the engine has confirmed that it dropped the request."""
    prompt = list(range(2, 1902))  # thirty steps of prefill
    with httpx.Client(http1=False, http2=True, timeout=60) as http:
        for _ in range(5):
            body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True}
            with http.stream("POST", f"{small.url}/v1/completions", json=body) as answer:
                assert answer.status_code == 200
            assert until(lambda: gauge(small, "running") == 0)
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


def stream(url: str, n: int, started: threading.Semaphore) -> str:
    """The whole stream's text; `started` is released at its first token."""
    body = {"prompt": [n + 2, 9], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    text, first = "", True
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for piece in answer.iter_text():
            text += piece
            if first and '"text"' in text:
                first = False
                started.release()
    return text


def test_a_killed_engine_ends_its_streams_and_comes_back(small: Server) -> None:
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(50) as pool:
        jobs = [pool.submit(stream, small.url, n, started) for n in range(50)]
        for _ in range(50):
            assert started.acquire(timeout=60)
        engine_core(small).kill()
        assert until(lambda: httpx.get(f"{small.url}/ready").status_code == 503)
        texts = [job.result(60) for job in jobs]
    for text in texts:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "engine_failed"
        assert text.rstrip().endswith("data: [DONE]")
    refused = httpx.post(f"{small.url}/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert httpx.get(f"{small.url}/health").status_code == 200
    assert until(lambda: httpx.get(f"{small.url}/ready").status_code == 200, 180)
    answer = httpx.post(f"{small.url}/v1/completions", json={"prompt": "x", "max_tokens": 4, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert gauge(small, "engine_restarts_total") == 1
    assert gauge(small, "engine_mismatches_total") == 0


def test_the_engine_does_not_outlive_a_killed_server(tiny: Path) -> None:
    """Nobody is left to stop it, and it would keep its memory."""
    prepare_environment()
    server = Server("--engine", "vllm", "--port", "0", "--enforce-eager", "--model", str(tiny), "--kv-cache-mb", "16")
    try:
        server.wait_ready(300)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) >= 2
        server.process.kill()
        _gone, alive = psutil.wait_procs(processes, timeout=30)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    finally:
        server.kill()
