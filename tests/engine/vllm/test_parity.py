"""evap's answers are those of vLLM's own server: same engine version, same weights, greedy, every request shape.

Both servers run side by side with SmolLM2 and are asked the same, one request at a time (a batch of another size can
round differently). Compared: text, finish_reason, stop_reason, usage, and log probabilities. Differences that stay:

- an answer cut in the middle of a character: evap ends it with U+FFFD, as the tokenizer's own decode of all the tokens
  does, so that the client sees that something is missing; vLLM leaves the bytes out;
- an alternative in `top_logprobs` that is part of a character: U+FFFD here (and its exact `bytes`), nothing in vLLM;
- the best k alternatives of a token that was sampled: in vLLM the sampled one takes the place of the last of them;
- n > 1 with temperature 0: n equal answers here, as from OpenAI; refused by vLLM;
- vLLM counts no `cached_tokens` in `prompt_tokens_details` unless it is started so; members that are null or constant.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.measure import free_port
from tests.engine.vllm.live import NEEDS_VLLM, prepare_environment
from tests.support import Server

pytestmark = [*NEEDS_VLLM, pytest.mark.model]

#: stands for a part of a character
CUT = "\ufffd"
OPTIONS = ("--enforce-eager", "--max-model-len", "2048", "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def vllm_url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    prepare_environment()
    port = free_port()
    log = tmp_path_factory.mktemp("vllm") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    command += ["--kv-cache-memory-bytes", str(256 << 20)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, process_group=0)
    try:
        url = f"http://127.0.0.1:{port}"
        wait(f"{url}/health", process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        threading.Event().wait(0.5)
    raise AssertionError(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture
def evap_url(real: Server) -> str:
    return real.url


QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Zähle auf Deutsch bis fünf: ",
    "Translate to Chinese: good morning",
    "Answer with an emoji only: how are you?",
    "List three prime numbers, one a line.",
)
PROMPTS = ("The capital of France is", "def fibonacci(n):", "1, 2, 3,", "Once upon a time, 你好", " ")


def chat(question: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 30, **fields}
    return "/v1/chat/completions", body


def completion(prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 20, **fields}


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"chat {n}": chat(question) for n, question in enumerate(QUESTIONS)},
    **{f"completion {n}": completion(prompt) for n, prompt in enumerate(PROMPTS)},
    "system": chat(
        "Hello", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ),
    "parts": chat("", messages=[{"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}]),
    "turns": chat(
        "",
        messages=[
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": "Hello, Ada."},
            {"role": "user", "content": "What is my name?"},
        ],
    ),
    "ids": completion([504, 3575, 282, 4649, 314]),
    "one token": completion("The sky is", max_tokens=1),
    "default length": completion("The sky is", max_tokens=None),
    "to the end": chat("Say hi.", max_tokens=200),
    "stop string": chat("Count from one to ten in digits.", stop=["5"], max_tokens=60),
    "stop strings": completion("a b c d e f g", stop=["j", " k "], max_tokens=40),
    "stop kept": completion("1, 2, 3,", stop=["7"], include_stop_str_in_output=True),
    "stop id": completion("1, 2, 3,", stop_token_ids=[28], max_tokens=30),
    "stop at once": completion("1, 2, 3,", stop=[" "]),
    "ignore eos": chat("Say hi.", ignore_eos=True, max_tokens=60),
    "special tokens": chat("Say hi.", ignore_eos=True, skip_special_tokens=False, max_tokens=60),
    "min tokens": chat("Say hi.", min_tokens=40, max_tokens=60),
    "bias": completion("The sky is", logit_bias={"4461": -100}),
    "penalties": completion("la la la la", presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.2),
    "n": chat("Name a colour.", n=3, temperature=0.8, seed=7),
    "seed": completion("Once upon a time", temperature=1.0, top_p=0.9, top_k=50, seed=11),
    "the model's defaults": chat("Name a colour.", temperature=None, seed=5, max_tokens=8),
    "some of the model's defaults": completion("Once upon a time", temperature=1.0, top_p=0.9, seed=11),
    "logprobs 0": chat("Name a colour.", logprobs=True, max_tokens=6),
    "logprobs 3": chat("Name a colour, in Chinese.", logprobs=True, top_logprobs=3, max_tokens=12),
    "logprobs n": chat("Name a colour.", logprobs=True, n=2, max_tokens=5, temperature=0.5, seed=3),
    "completion logprobs": completion("The sky is", logprobs=2, max_tokens=5),
    "echo": completion("The sky is", echo=True, max_tokens=5),
    "echo logprobs": completion("The sky is blue and", echo=True, logprobs=1, max_tokens=3),
    "json object": chat("Give me a JSON object with a name.", response_format={"type": "json_object"}, max_tokens=60),
    "json schema": chat(
        "A person, as JSON.",
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "p",
                "schema": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]},
            },
        },
        max_tokens=40,
    ),
    "regex": completion("Answer: ", structured_outputs={"regex": "[ab]{4}"}),
    "choice": completion("Red or green? ", structured_outputs={"choice": ["red", "green"]}),
}


def whole(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(
        f"{url}{path}", json={"model": "m", **{k: v for k, v in body.items() if v is not None}}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A stream, folded into the shape of a whole answer."""
    sent = {"model": "m", **{k: v for k, v in body.items() if v is not None}}
    sent |= {"stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    with httpx.stream("POST", f"{url}{path}", json=sent, timeout=120) as answer:
        assert answer.status_code == 200
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for event in map(json.loads, lines[:-1]):
        usage = event.get("usage") or usage
        for piece in event["choices"]:
            found = choices.setdefault(piece["index"], {"text": "", "logprobs": []})
            delta = piece.get("delta") or {}
            found["text"] += piece.get("text") or delta.get("content") or ""
            found["logprobs"] += entries(piece.get("logprobs"))
            for name in ("finish_reason", "stop_reason"):
                if piece.get(name) is not None:
                    found[name] = piece[name]
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


Entry = tuple[str, float | None, frozenset[str]]


def entries(logprobs: Any) -> list[Entry]:
    """(token, logprob, alternatives) of either dialect."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return [
            (e["token"], e["logprob"], frozenset(t["token"].strip(CUT) for t in e["top_logprobs"]))
            for e in logprobs["content"] or ()
        ]
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    columns = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    return [(token, value, frozenset(top or ())) for token, value, top in columns]


def essence(answer: dict[str, Any]) -> tuple[list[Any], list[list[Entry]], dict[str, int]]:
    choices, logprobs = [], []
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        choices.append((text.rstrip(CUT), choice.get("finish_reason"), choice.get("stop_reason")))
        found = choice.get("logprobs")
        logprobs.append(found if isinstance(found, list) else entries(found))
    usage = {k: answer["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return choices, logprobs, usage


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    (choices, logprobs, usage), (wanted, wanted_logprobs, wanted_usage) = essence(ours), essence(theirs)
    assert choices == wanted
    assert usage == wanted_usage
    for own, other in zip(logprobs, wanted_logprobs, strict=True):
        assert [e[0] for e in own] == [e[0] for e in other]
        assert [e[2] for e in own] == [e[2] for e in other]
        assert [e[1] for e in own] == [None if e[1] is None else pytest.approx(e[1], abs=0.02) for e in other]


@functools.cache
def theirs(url: str, shape: str) -> dict[str, Any]:
    return whole(url, *SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
def test_whole_answers(vllm_url: str, evap_url: str, shape: str) -> None:
    same(whole(evap_url, *SHAPES[shape]), theirs(vllm_url, shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_streams_fold_into_the_whole_answer(vllm_url: str, evap_url: str, shape: str) -> None:
    same(streamed(evap_url, *SHAPES[shape]), theirs(vllm_url, shape))


@pytest.mark.parametrize("shape", ["chat 3", "stop strings", "n", "logprobs 3", "completion logprobs", "echo logprobs"])
def test_streams(vllm_url: str, evap_url: str, shape: str) -> None:
    same(streamed(evap_url, *SHAPES[shape]), streamed(vllm_url, *SHAPES[shape]))
