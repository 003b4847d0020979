"""Several loop processes and one torch engine: its tokens go to whoever asked, and either side may be killed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.clients.asking import eventually
from tests.listeners import tree
from tests.many import ask, children, loops, numbers, ready, records, streams
from tests.support import ROOT, STOP_TIMEOUT_S, Server, running

pytest.importorskip("torch")
DONE = b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("many")
    subprocess.run([sys.executable, "-m", "bench.tiny_llama", str(folder / "model")], cwd=ROOT, check=True)
    flags = ("--workers", "3", "--threads", "1", "--kv-cache-mb", "64", "--data-dir", str(folder / "data"))
    with running(str(folder / "model"), *flags, engine="torch") as server:
        yield server, folder / "data"


def engine_of(server: Server) -> psutil.Process:
    [found] = children(server, "evap.engine.torch.worker")
    return found


def test_all_share_one_engine_and_get_their_own_tokens(many: tuple[Server, Path]) -> None:
    """The same question of all at once: greedy answers are the same, whichever process and slot they come from."""
    server, data = many
    with ThreadPoolExecutor(12) as pool:
        more: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": False}
        answers = list(pool.map(lambda n: ask(server, f"q{n % 4}", 24, **more), range(48)))
    texts = Counter((n % 4, a.json()["choices"][0]["message"]["content"]) for n, a in enumerate(answers))
    assert len(texts) == 4
    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [24] * 48
    page = numbers(server)
    assert page['evap_tokens_total{kind="computed"}'] == 48 * 24
    assert page["evap_meter_mismatches_total"] == 0  # the engine's own counts, one page for each process
    assert page["evap_running"] == page["evap_waiting"] == 0
    assert len([p for p in loops(server) if p.cpu_times().user > 0]) == 3
    eventually(lambda: len(records(data)) == 48, "the ledger has them")
    assert {r.steps for r in records(data)} == {24}


def test_a_killed_loop_process_leaves_the_engine_nothing_to_do(many: tuple[Server, Path]) -> None:
    server, data = many
    before = len(records(data))
    life = streams(server, 18, 1500, ignore_eos=True, temperature=0)
    next(life)
    engine, victim = engine_of(server), loops(server)[0]
    victim.kill()
    eventually(lambda: len(loops(server)) == 3 and victim not in loops(server), "a new one", STOP_TIMEOUT_S)
    answers = next(life)
    broken = sum(not a.endswith(DONE) for a in answers)
    assert 0 < broken < 18
    assert all(b'data: {"error"' not in a for a in answers if a.endswith(DONE))
    eventually(lambda: numbers(server)["evap_kv_cache_usage"] == 0, "its generations are cancelled", STOP_TIMEOUT_S)
    assert engine_of(server) == engine
    ends = Counter(r.end for r in records(data)[before:])
    assert ends == {"length": 18 - broken, "interrupted": broken}
    assert [ask(server, "w", 3, ignore_eos=True).status_code for _ in range(12)] == [200] * 12


def test_without_a_parent_the_engine_finishes_what_runs(many: tuple[Server, Path], tmp_path: Path) -> None:
    """kill -9 of the parent: streams end as if nothing had happened, then nothing of the tree is left."""
    model = str(many[1].parent / "model")
    flags = ("--workers", "2", "--threads", "1", "--kv-cache-mb", "64", "--data-dir", str(tmp_path))
    server = Server("--engine", "torch", "--port", "0", model, *flags)
    try:
        server.wait_ready()
        life = streams(server, 6, 800, ignore_eos=True)
        next(life)
        left = tree(server.process.pid)[1:]
        assert engine_of(server).pid in left
        server.process.kill()
        answers = next(life)
        assert all(a.endswith(DONE) and b'data: {"error"' not in a for a in answers)
        eventually(lambda: not any(psutil.pid_exists(pid) for pid in left), "all have ended", STOP_TIMEOUT_S)
    finally:
        server.kill()
    assert [(r.end, r.delivered) for r in records(tmp_path)] == [("length", 800)] * 6


def test_a_killed_engine_comes_back_to_all(many: tuple[Server, Path]) -> None:
    server, _ = many
    life = streams(server, 12, 1500, ignore_eos=True)
    next(life)
    dead = engine_of(server)
    dead.kill()
    answers = next(life)
    assert all(a.endswith(DONE) for a in answers)
    assert all(b'data: {"error"' in a for a in answers)

    eventually(
        lambda: all(ready(server) for _ in range(9)), "every process has a way to the new engine", STOP_TIMEOUT_S
    )
    assert engine_of(server) != dead
    assert [ask(server, "w", 3, ignore_eos=True).status_code for _ in range(12)] == [200] * 12
