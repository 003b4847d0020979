"""Metering as operators and clients meet it: a server process, its flags, its signals."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench import tiny_llama
from evap.metering import keys
from evap.protocol.api.router import PREFIXES, ROUTES
from tests.clients.asking import eventually, gauge
from tests.support import TIME_FACTOR, Server, running

WAIT_S = 60.0 * TIME_FACTOR
StartServer = Callable[..., Server]


def client(server: Server, key: str = "") -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=server.url, trust_env=False, timeout=WAIT_S, headers=headers)


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def ready(http: httpx.Client, status: int) -> None:
    eventually(lambda: http.get("/ready").status_code == status, f"/ready answers {status}", WAIT_S)


def stays_ready(http: httpx.Client, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert http.get("/ready").status_code == 200, "saturated is not hung"
        time.sleep(0.1)


def test_a_key_file_is_read_again_on_sighup(start_server: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    alice = keys.create(file, "alice", {})
    server = start_server("--api-keys", str(file))
    with client(server, alice) as http:
        assert http.get("/v1/models").status_code == 200
        bob = keys.create(file, "bob", {})
        keys.revoke(file, "alice")
        server.process.send_signal(signal.SIGHUP)
        server.wait_log("keys read from")
        assert http.get("/v1/models").status_code == 401
        assert http.get("/health").status_code == 200
    with client(server, bob) as http:
        assert http.get("/v1/models").status_code == 200
    assert alice not in server.log
    assert bob not in server.log


@pytest.mark.parametrize("http2", [False, True])
def test_each_route_asks_for_a_key_over_a_socket(start_server: StartServer, tmp_path: Path, http2: bool) -> None:
    """Every route that the router has, whatever it will have: 401 without a key, with a wrong one, and for HEAD."""
    file = tmp_path / "keys.toml"
    keys.create(file, "alice", {})
    server = start_server("--api-keys", str(file))
    routes = [*ROUTES.items(), *((prefix + "x", route) for prefix, route in PREFIXES.items())]
    with httpx.Client(base_url=server.url, http1=not http2, http2=http2, trust_env=False) as http:
        for path, route in routes:
            expected = {200, 503} if route.public else {401}
            for method in (route.method, "HEAD") if route.method == "GET" else (route.method,):
                assert http.request(method, path).status_code in expected, (method, path)
                wrong = {"authorization": "Bearer sk-evap-wrong"}
                assert http.request(method, path, headers=wrong).status_code in expected, (method, path)


def test_sighup_without_keys_is_nothing(start_server: StartServer) -> None:
    server = start_server()
    server.process.send_signal(signal.SIGHUP)
    with client(server) as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--api-keys", "/nonexistent.toml"), "key file"), (("--prices", "/nonexistent.toml"), "prices"),
     (("--data-dir", "/proc/nowhere"), "--data-dir"), (("--usage-sink", "postgresql://x"), "--usage-sink")],
)  # fmt: skip
def test_what_cannot_work_is_said_at_the_start(flags: tuple[str, ...], message: str) -> None:
    server = Server("--engine", "synthetic", "--port", "0", *flags)
    try:
        assert server.process.wait(WAIT_S) == 2
        server.wait_log(r"(?m)^error: .*" + message)
        server.wait_log(r"(?m)^  try: ")
    finally:
        server.kill()


def test_a_hung_engine_is_not_ready_and_a_saturated_one_is(start_server: StartServer) -> None:
    server = start_server("synthetic-faults", "--hang-timeout", "0.5", "--max-running", "1", "--synthetic-step-ms", "5")
    with client(server) as http, client(server) as other:
        with (
            other.stream("POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=100_000)),
            client(server) as third,
            third.stream("POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=5)),  # waits for a place
        ):
            stays_ready(http, 1.2)
        with other.stream("POST", "/v1/chat/completions", json=chat("fault:hang", stream=True, max_tokens=100_000)):
            ready(http, 503)
            assert http.get("/ready").json()["status"] == "hung"
            assert http.get("/health").status_code == 200
            server.wait_log("has work and makes no progress")
        server.kill()


def test_a_stopped_engine_process(tmp_path: Path) -> None:
    """Case 85: a saturated engine is ready, one that was stopped (SIGSTOP) is not, and is again once it goes on."""
    pytest.importorskip("torch", reason="needs torch")
    model = str(tiny_llama.build(tmp_path / "model", letters=True))
    flags = ("--hang-timeout", "1", "--max-running", "1", "--threads", "1", "--data-dir", str(tmp_path / "data"))
    with running(model, *flags, engine="torch") as server:
        (engine,) = psutil.Process(server.process.pid).children()
        with client(server) as http, client(server) as other, client(server) as third:
            long = chat(stream=True, max_tokens=3500, ignore_eos=True, top_k=20)
            with other.stream("POST", "/v1/chat/completions", json=long) as answer:
                next(answer.iter_lines())
                with third.stream("POST", "/v1/chat/completions", json=long):  # waits for a place
                    stays_ready(http, 1.5)
            with third.stream("POST", "/v1/chat/completions", json=long) as answer:  # has most of its tokens to come
                lines = answer.iter_lines()
                next(lines)
                engine.suspend()
                try:
                    ready(http, 503)
                    body = http.get("/ready").json()
                    assert body["status"] == "hung"
                    assert re.search(
                        r"no progress for \d+ s: (in one step for \d+ s|between two steps)", body["trouble"]
                    )
                    assert http.get("/health").status_code == 200
                finally:
                    engine.resume()
                ready(http, 200)
                next(lines)
        assert "counts" not in server.log


def test_a_prefill_that_takes_longer_than_the_time_out(tmp_path: Path) -> None:
    """It gives no token meanwhile; the engine's steps are its progress."""
    pytest.importorskip("torch", reason="needs torch")
    model = str(tiny_llama.build(tmp_path / "model", layers=4, letters=True))
    flags = ("--hang-timeout", "0.2", "--prefill-chunk", "16", "--threads", "1", "--token-cache-mb", "0")
    with running(model, *flags, engine="torch") as server, client(server) as http:
        http.post("/v1/chat/completions", json=chat("x" * 3900, max_tokens=1)).raise_for_status()
        assert "makes no progress" not in server.log


def test_a_step_that_takes_longer_than_the_time_out(tmp_path: Path) -> None:
    """All of a prompt in one step: its layers are the engine's progress."""
    pytest.importorskip("torch", reason="needs torch")
    model = str(tiny_llama.build(tmp_path / "model", layers=40, letters=True))
    flags = ("--hang-timeout", "0.3", "--prefill-chunk", "4096", "--threads", "1", "--token-cache-mb", "0")
    with running(model, *flags, engine="torch") as server, client(server) as http, client(server) as other:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(http.post, "/v1/chat/completions", json=chat("x" * 3900, max_tokens=1))
            began = time.monotonic()
            while not asked.done():
                assert other.get("/ready").status_code == 200
        assert time.monotonic() - began > 0.6, "the step took no longer than the time-out: it proves nothing"
        asked.result().raise_for_status()
        assert "makes no progress" not in server.log


def test_ledger_metrics(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--data-dir", str(tmp_path))
    with client(server) as http:
        id = http.post("/v1/chat/completions", json=chat(max_tokens=3)).json()["id"]
        eventually(lambda: gauge(server, "evap_ledger_records_total") == 1, "the record is in the ledger", WAIT_S)
        assert http.get(f"/v1/usage/{id}").json()["emitted"] == 3
        assert http.get("/v1/usage?group_by=model").json()["data"][0]["model"] == "synthetic"
