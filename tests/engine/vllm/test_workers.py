"""Several loop processes and one vLLM engine: each gets its own tokens, counts are exact, any of them may be killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.clients.asking import eventually
from tests.engine.vllm.live import NEEDS_VLLM, serve
from tests.many import ask, loops, numbers, ready, records, streams
from tests.support import STOP_TIMEOUT_S, TIME_FACTOR, Server

pytestmark = NEEDS_VLLM
DONE = b"data: [DONE]\n\n"
START_S = 240.0 * TIME_FACTOR
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": False}


@pytest.fixture(scope="module")
def many(request: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path, str]]:
    data = tmp_path_factory.mktemp("many") / "data"
    flags = ("--workers", "2", "--max-model-len", "2048", "--kv-cache-mb", "64", "--data-dir", str(data))
    for server in serve("--model", str(tiny), "--token-path", request.param, *flags):
        yield server, data, request.param


def engine_of(server: Server) -> psutil.Process:
    found = psutil.Process(server.process.pid).children(recursive=True)
    return next(process for process in found if "EngineCore" in process.name())


def together(server: Server, count: int, tokens: int, **more: Any) -> list[httpx.Response]:
    """So many at once, each over a connection of its own; four questions."""
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda n: ask(server, f"q{n % 4}", tokens, **{**GREEDY, **more}), range(count)))


def busy(server: Server) -> list[float]:
    return sorted(process.cpu_times().user for process in loops(server))


def listens(process: psutil.Process) -> bool:
    return any(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp"))


@pytest.mark.parametrize("many", ["core", "scheduler"], indirect=True)
def test_all_share_one_engine_and_get_their_own_tokens(many: tuple[Server, Path, str]) -> None:
    """The same question of all at once: greedy answers are the same, whichever process and slot they come from."""
    server, data, path = many
    before = busy(server)
    answers = together(server, 48, 24)
    texts = {(n % 4, a.json()["choices"][0]["message"]["content"]) for n, a in enumerate(answers)}
    assert len(texts) == 4
    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [24] * 48
    assert all(now > then for now, then in zip(busy(server), before, strict=True)), "both processes have served"
    eventually(lambda: len(records(data)) == 48, "the ledger has them")
    page, kept = numbers(server), records(data)
    for kind in ("computed", "emitted", "delivered", "prompt", "cached"):
        assert page[f'evap_tokens_total{{kind="{kind}"}}'] == sum(getattr(r, kind) for r in kept), kind
    assert page['evap_tokens_total{kind="emitted"}'] == 48 * 24
    assert page["evap_meter_mismatches_total"] == page["evap_engine_mismatches_total"] == 0, path
    assert page["evap_running"] == page["evap_waiting"] == 0
    assert {r.steps for r in kept} <= {24, 25}, "counted where they were sampled, one step past an end at most"


@pytest.mark.parametrize("many", ["core", "scheduler"], indirect=True)
def test_a_killed_loop_process_leaves_the_engine_nothing_to_do(many: tuple[Server, Path, str]) -> None:
    """Its requests are aborted, its exchanges settled with what the engine had counted; others notice nothing."""
    server, data, _ = many
    before = len(records(data))
    life = streams(server, 16, 1900, ignore_eos=True, temperature=0)
    next(life)
    engine, victim = engine_of(server), loops(server)[0]
    victim.kill()
    answers = next(life)
    broken = sum(not a.endswith(DONE) for a in answers)
    assert 0 < broken < 16
    assert all(b'data: {"error"' not in a for a in answers if a.endswith(DONE))
    eventually(lambda: len(records(data)) == before + 16, "what the dead one had is settled", STOP_TIMEOUT_S)
    ends = [r for r in records(data)[before:] if r.end == "interrupted"]
    assert len(ends) == broken
    # What the engine had sampled, some of it ahead of clients that were slow to read.
    assert [r.computed for r in ends if not 0 < r.computed <= 1901] == []
    assert Counter(r.end for r in records(data)[before:]) == {"length": 16 - broken, "interrupted": broken}
    # The other one goes on alone: no connection waits for the one that starts.
    assert [a.status_code for a in together(server, 8, 3)] == [200] * 8

    def both() -> bool:
        now = loops(server)
        return len(now) == 2 and victim not in now and all(listens(p) for p in now)

    eventually(both, "a new one serves", START_S)
    texts = {(n % 4, a.json()["choices"][0]["message"]["content"]) for n, a in enumerate(together(server, 32, 24))}
    assert len(texts) == 4
    page = numbers(server)
    assert page["evap_meter_mismatches_total"] == page["evap_engine_mismatches_total"] == 0
    assert engine_of(server) == engine


@pytest.mark.parametrize("many", ["core"], indirect=True)
def test_a_killed_engine_comes_back_to_all(many: tuple[Server, Path, str]) -> None:
    server, _, _ = many
    life = streams(server, 12, 1900, ignore_eos=True)
    next(life)
    dead = engine_of(server)
    dead.kill()
    answers = next(life)
    assert all(a.endswith(DONE) for a in answers)
    assert all(b'data: {"error"' in a for a in answers)

    assert not ready(server)
    eventually(lambda: all(ready(server) for _ in range(9)), "every process has a way to the new engine", START_S)
    assert engine_of(server) != dead
    assert [a.status_code for a in together(server, 12, 3)] == [200] * 12
    assert numbers(server)["evap_engine_restarts_total"] == 1
