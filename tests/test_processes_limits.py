"""Limits of keys, and turns among them, where connections of a key are spread over several processes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

from evap.metering import keys
from tests.clients.asking import chat, eventually
from tests.many import CHAT, StartServer, ask, key_file, numbers, records
from tests.support import STOP_TIMEOUT_S, Server


def statuses(server: Server, count: int, tokens: int, secret: str) -> tuple[Counter[int], int]:
    """Of so many requests at once, each over a connection of its own; and what a minute's limit of 60 regains
    meanwhile."""
    began = time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        answers = Counter(pool.map(lambda n: ask(server, "w", tokens, secret, stream=False).status_code, range(count)))
    return answers, int(time.monotonic() - began) + 1


def post(server: Server, secret: str) -> int:
    """As `ask`, for less of the cores that the server needs."""
    connection = HTTPConnection(server.host, server.port, timeout=STOP_TIMEOUT_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {secret}"}
    connection.request("POST", CHAT, chat("w", 8, stream=False, ignore_eos=True), headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def test_requests_per_minute_are_those_of_all_processes(start_server: StartServer, tmp_path: Path) -> None:
    path, secret = key_file(tmp_path, requests_per_minute=60)
    server = start_server("--workers", "3", "--synthetic-step-ms", "0", "--api-keys", path)
    answers, regained = statuses(server, 160, 1, secret)
    assert answers.keys() <= {200, 429}
    assert 60 <= answers[200] <= 60 + regained


def test_tokens_per_minute_are_those_of_all_processes(start_server: StartServer, tmp_path: Path) -> None:
    path, secret = key_file(tmp_path, tokens_per_minute=60 * 20)
    server = start_server("--workers", "3", "--synthetic-step-ms", "0", "--api-keys", path)
    answers, regained = statuses(server, 160, 8, secret)  # 12 of the prompt, and 8: twenty each
    assert answers.keys() <= {200, 429}
    assert 60 <= answers[200] <= 60 + regained


def test_one_at_a_time_has_its_turns_beside_fifty_at_every_process(start_server: StartServer, tmp_path: Path) -> None:
    """Two processes with a place each, and a key whose requests fill both queues: while a request of the other key
    waits, a few of the first are begun, and not the fifty that came before it."""
    path, greedy = key_file(tmp_path)
    honest = keys.create(Path(path), "bob", {})
    flags = (
        "--synthetic-step-ms",
        "15",
        "--max-running",
        "2",
        "--api-keys",
        path,
        "--data-dir",
        str(tmp_path / "data"),
    )
    server = start_server("--workers", "2", *flags)
    done = threading.Event()

    def hog(n: int) -> None:
        while not done.is_set():
            assert post(server, greedy) == 200

    with ThreadPoolExecutor(50) as pool:
        hogs = [pool.submit(hog, n) for n in range(50)]
        try:
            eventually(lambda: numbers(server, honest)["evap_waiting"] >= 30, "both queues are full", STOP_TIMEOUT_S)
            assert [post(server, honest) for _ in range(8)] == [200] * 8  # one after the other
        finally:
            done.set()
        assert all(task.result() is None for task in hogs)
    server.stop()
    rows = records(tmp_path / "data")
    mine, others = [r for r in rows if r.key == "bob"], [r for r in rows if r.key != "bob"]
    before = [sum(r.opened_us < other.first_us <= r.first_us for other in others) for r in mine]
    assert len(mine) == 8
    assert sum(before) <= 8 * 3, f"others that were begun meanwhile: {before}"
