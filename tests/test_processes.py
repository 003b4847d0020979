"""`--workers N` as clients meet it: one port, one set of accounts, one page of metrics, whoever answers or dies."""

from __future__ import annotations

import json
import random
import re
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from evap.config import Config, EngineConfig, ProtocolConfig
from evap.metering import ledger
from evap.processes import shares
from tests.clients.asking import chat, eventually, said, text_of
from tests.listeners import tcp_ports, tree
from tests.many import CHAT, JSON, StartServer, ask, key_file, loops, numbers, records, streams, usage
from tests.support import STOP_TIMEOUT_S, TIME_FACTOR, Server, running

#: An answer's last octets leave before it is counted: some microseconds later, if the system lets the process run.
SETTLED_S = 0.3 * TIME_FACTOR


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """Three processes on a port and a UNIX socket, and the folder with their socket `s` and ledger."""
    folder = tmp_path_factory.mktemp("many")
    flags = ("--workers", "3", "--synthetic-step-ms", "2", "--data-dir", str(folder), "--uds", str(folder / "s"))
    with running(*flags) as server:
        yield server, folder


def test_every_process_serves_and_one_scrape_has_exact_sums(many: tuple[Server, Path]) -> None:
    """Case 92: many requests over many connections; what clients counted is on the page and in the ledger."""
    server, folder = many
    assert "3 loop processes" in server.log
    first, rows_first = numbers(server), len(records(folder))
    dice = random.Random(92)
    sizes = [dice.randint(1, 40) for _ in range(120)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda n: ask(server, f"w{n}", sizes[n], stream=n % 2 == 0), range(len(sizes))))
    assert [a.status_code for a in answers] == [200] * len(sizes)
    got = sum(len(text_of(a.content)) for a in answers[::2])
    got += sum(a.json()["usage"]["completion_tokens"] for a in answers[1::2])
    assert got == sum(sizes)
    wanted = {
        'evap_exchanges_total{end="length"}': len(sizes), 'evap_tokens_total{kind="delivered"}': sum(sizes),
        "evap_generated_tokens_total": sum(sizes), "evap_request_duration_seconds_count": len(sizes),
    }  # fmt: skip
    for _ in range(4):  # whichever process is asked
        page = numbers(server)
        assert {name: page[name] - first[name] for name in wanted} == wanted
        assert page["evap_loop_processes"] == 3
    eventually(lambda: len(records(folder)) == rows_first + len(sizes), "the ledger has them")
    rows = records(folder)
    assert sum(r.delivered for r in rows[rows_first:]) == sum(sizes)
    assert numbers(server)["evap_ledger_records_total"] == len(rows)
    used = httpx.get(server.url + "/v1/usage?group_by=key", trust_env=False, timeout=STOP_TIMEOUT_S).json()
    assert (used["data"][0]["exchanges"], used["data"][0]["delivered"]) == (len(rows), sum(r.delivered for r in rows))
    served = [p for p in loops(server) if p.cpu_times().user > 0]
    assert len(served) == 3


def test_a_budget_holds_for_all_processes_together(start_server: StartServer, tmp_path: Path) -> None:
    """Case 44: 50 at once against a budget for ten; not one token more than it has."""
    path, secret = key_file(tmp_path, tokens_per_day=200)
    server = start_server(
        "--workers", "3", "--synthetic-step-ms", "1", "--api-keys", path, "--data-dir", str(tmp_path / "data")
    )
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda n: ask(server, "w", 10, secret, stream=False), range(50)))
    assert Counter(a.status_code for a in answers).keys() <= {200, 429, 402, 403}
    used = sum(a.json()["usage"]["total_tokens"] for a in answers if a.status_code == 200)
    assert 150 < used <= 200
    refused = next(a for a in answers if a.status_code != 200)
    assert refused.json()["error"]["code"] == "insufficient_quota" or "tokens per day" in refused.text
    server.stop()
    assert sum(r.prompt + r.billable for r in records(tmp_path / "data")) == used


def test_streams_of_a_key_are_counted_over_all_processes(start_server: StartServer, tmp_path: Path) -> None:
    path, secret = key_file(tmp_path, max_streams=4)
    server = start_server(
        "--workers", "3", "--synthetic-ttft-ms", "2000", "--synthetic-step-ms", "0", "--api-keys", path
    )
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: ask(server, "w", 3, secret).status_code, range(20)))
    assert Counter(answers) == {200: 4, 429: 16}
    assert ask(server, "w", 3, secret).status_code == 200  # they were given back


def test_an_operation_is_generated_once_whichever_process_it_comes_to(many: tuple[Server, Path]) -> None:
    server, _ = many
    with ThreadPoolExecutor(12) as pool:
        headers = {"idempotency-key": "once"}
        answers = list(pool.map(lambda n: ask(server, "w", 30, headers=headers, stream=False), range(12)))
    assert Counter(a.status_code for a in answers) == {200: 1, 409: 11}
    [made] = [a.json()["id"] for a in answers if a.status_code == 200]
    assert all(made in a.text for a in answers)
    late = [ask(server, "w", 30, headers=headers) for _ in range(6)]
    assert {a.json()["error"]["code"] for a in late} == {"operation_complete"}


def test_an_exchange_can_be_asked_for_at_every_process(many: tuple[Server, Path]) -> None:
    server, _ = many
    content = chat("w", 100_000, ignore_eos=True)
    with httpx.stream("POST", server.url + CHAT, headers=JSON, content=content, timeout=STOP_TIMEOUT_S) as stream:
        lines = stream.iter_lines()
        id = json.loads(next(lines).removeprefix("data: "))["id"]
        while_it_runs = [usage(server, id) for _ in range(8)]
    assert {(u["state"], u["prompt"], u["operation"]) for u in while_it_runs} == {("running", 12, "")}
    counts = [u["computed"] for u in while_it_runs]
    assert counts == sorted(counts)
    eventually(lambda: usage(server, id)["state"] == "settled", "it is settled")
    settled = [usage(server, id) for _ in range(8)]
    assert all(one == settled[0] for one in settled)
    assert settled[0]["end"] == "client_abort"
    assert settled[0]["computed"] >= counts[-1]
    assert httpx.get(f"{server.url}/v1/usage/chatcmpl-none", trust_env=False).status_code == 404


def test_a_killed_process_is_replaced_and_its_exchanges_are_settled(tmp_path: Path) -> None:
    """kill -9 of one: the others' streams go on; nothing is lost from, or twice in, ledger and accounts."""
    path, secret = key_file(tmp_path, max_streams=40, tokens_per_day=1_000_000)
    data = tmp_path / "data"
    with running("--workers", "3", "--synthetic-step-ms", "10", "--api-keys", path, "--data-dir", str(data)) as server:
        done = [ask(server, "w", 5, secret).status_code for _ in range(20)]
        assert done == [200] * 20
        before = numbers(server, secret)
        life = streams(server, 30, 240, secret, ignore_eos=True)
        next(life)
        victim = loops(server)[1]
        victim.kill()
        answers = next(life)
        whole = [a for a in answers if a.endswith(b"data: [DONE]\n\n") and b'"error"' not in a]
        broken = len(answers) - len(whole)
        assert 0 < broken < 30
        new_one = lambda: len(loops(server)) == 3 and numbers(server, secret)["evap_loop_processes"] == 3  # noqa: E731
        eventually(new_one, "a new one serves", STOP_TIMEOUT_S)
        page = numbers(server, secret)
        assert page['evap_exchanges_total{end="interrupted"}'] == broken
        assert page['evap_exchanges_total{end="length"}'] == 20 + len(whole)
        assert page['evap_tokens_total{kind="delivered"}'] >= before['evap_tokens_total{kind="delivered"}']
        rows = records(data)
        assert Counter(r.end for r in rows) == {"length": 20 + len(whole), "interrupted": broken}
        assert all(0 < r.computed < 240 for r in rows if r.end == "interrupted")
        assert page['evap_tokens_total{kind="computed"}'] == sum(r.computed for r in rows)
        again = list(streams(server, 36, 5, secret))[1]  # no stream of the dead one is held any more
        assert all(a.endswith(b"data: [DONE]\n\n") for a in again)


def test_one_that_cannot_be_settled_yet_is_not_up(tmp_path: Path) -> None:
    """The ledger is locked when it dies: the others say that there is one less, and it comes back when it is not."""
    with running("--workers", "2", "--synthetic-step-ms", "0", "--data-dir", str(tmp_path)) as server:
        assert numbers(server)["evap_loop_processes"] == 2
        other = sqlite3.connect(tmp_path / ledger.FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        loops(server)[0].kill()
        eventually(lambda: numbers(server)["evap_loop_processes"] == 1, "one is gone", STOP_TIMEOUT_S)
        assert ask(server, "w", 3).status_code == 200
        other.execute("ROLLBACK")
        other.close()
        eventually(lambda: numbers(server)["evap_loop_processes"] == 2, "it is back", STOP_TIMEOUT_S)


def test_a_kill_loses_no_count(tmp_path: Path) -> None:
    """Case 92 with kill -9: what a process has answered is on the page, whether the parent had looked since or not."""
    flags = ("--workers", "2", "--synthetic-step-ms", "0", "--data-dir", str(tmp_path))
    with running(*flags) as server:
        answered = killed = 0
        for victims in (1, 2, 1):
            with ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(lambda n: ask(server, "w", n + 1, ignore_eos=True).status_code, range(24)))
            answered += len(answers)
            assert answers == [200] * 24
            threading.Event().wait(SETTLED_S)
            for victim in loops(server)[:victims]:
                victim.kill()
            killed += victims
            eventually(partial(have_ended, server, killed), "their ends are known", STOP_TIMEOUT_S)
            eventually(lambda: up(server) == 2, "new ones serve", STOP_TIMEOUT_S)
            rows, page = records(tmp_path), numbers(server)
            tokens = {name: sum(getattr(r, name) for r in rows) for name in ("prompt", "computed", "delivered")}
            assert len(rows) == answered
            assert {name: page[f'evap_tokens_total{{kind="{name}"}}'] for name in tokens} == tokens
            assert page["evap_generated_tokens_total"] == tokens["computed"]
            assert page["evap_started_prompt_tokens_total"] == tokens["prompt"]
            assert page['evap_choices_total{reason="length"}'] == page['evap_exchanges_total{end="length"}'] == answered
            for name in ("evap_request_duration", "evap_time_to_first_token", "evap_request_decode"):
                assert page[f"{name}_seconds_count"] == answered
            assert page["evap_ledger_records_total"] == answered


def have_ended(server: Server, many: int) -> bool:
    return server.log.count("starts again") == many


def up(server: Server) -> float:
    """Loop processes that serve; 0 while nobody says so."""
    try:
        return numbers(server).get("evap_loop_processes", 0)
    except httpx.HTTPError:
        return 0


def test_a_stopped_process_holds_up_no_scrape(start_server: StartServer) -> None:
    server = start_server("--workers", "2", "--synthetic-step-ms", "0")
    assert [ask(server, "w", 3).status_code for _ in range(8)] == [200] * 8
    for _ in range(24):  # by both, of the other: so that all is known of both
        numbers(server)
    victim = loops(server)[0]
    victim.suspend()
    try:
        began = time.monotonic()
        for _ in range(8):  # until the other one is asked
            try:
                text = httpx.get(server.url + "/metrics", timeout=3, trust_env=False).text
                break
            except httpx.TimeoutException:
                continue
        assert 'evap_exchanges_total{end="length"} 8' in text
        assert time.monotonic() - began < STOP_TIMEOUT_S
    finally:
        victim.resume()


def test_the_tree_listens_on_its_port_only_and_random_bytes_hurt_nobody(many: tuple[Server, Path]) -> None:
    """Case 86: whatever the processes say to each other goes over inherited descriptors."""
    server, folder = many
    path = str(folder / "s")
    assert tcp_ports(tree(server.process.pid)) == {server.port}
    dice = random.Random(86)
    places: list[tuple[int, Any]] = [(socket.AF_INET, ("127.0.0.1", server.port)), (socket.AF_UNIX, path)]
    for family, place in places * 20:
        with socket.socket(family) as rude:
            rude.settimeout(STOP_TIMEOUT_S)
            rude.connect(place)
            try:
                rude.sendall(dice.randbytes(dice.choice((1, 30, 3000))))
                rude.shutdown(socket.SHUT_WR)
                while rude.recv(65_536):
                    pass
            except OSError:
                pass  # it was closed before all was sent
    assert text_of(ask(server, "polite", 20).content) == said("polite", 20)
    with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
        found = [client.get("http://localhost/health").status_code for _ in range(4)]
    assert found == [200] * 4
    assert len(loops(server)) == 3


def test_the_page_says_what_the_system_says_of_each_process(many: tuple[Server, Path]) -> None:
    server, _ = many
    for _ in range(4):  # whichever process is asked
        text = httpx.get(server.url + "/metrics", timeout=STOP_TIMEOUT_S, trust_env=False).text
        found = re.findall(r'^process_resident_memory_bytes\{process="(\w+)"\} (\S+)$', text, re.M)
        assert sorted(name for name, _ in found) == ["0", "1", "2", "parent"]
        assert all(float(size) > 1 << 20 for _, size in found)
        assert len(re.findall(r"^process_open_fds\b", text, re.M)) == 4
        assert len(re.findall(r'^python_gc_collections_total\{generation="\d"\} ', text, re.M)) == 3
        assert text.count("\npython_info{") == 1


def test_a_taken_port_is_said_once() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = Server("--engine", "synthetic", "--workers", "2", "--port", str(taken.getsockname()[1]))
        assert server.process.wait(STOP_TIMEOUT_S) == 2
        server.kill()
        assert server.log.count("is taken") == 1


def test_one_self_signed_certificate_for_all(start_server: StartServer) -> None:
    server = start_server("--workers", "3", "--tls", "self-signed", "--synthetic-step-ms", "0")
    import ssl

    certificates = {ssl.get_server_certificate(("127.0.0.1", server.port)) for _ in range(12)}
    assert len(certificates) == 1


def test_limits_of_the_whole_are_split() -> None:
    config = shares(
        Config(protocol=ProtocolConfig(max_connections=10), engine=EngineConfig(max_queued_requests=7, max_running=64)),
        4,
    )
    assert config.protocol.max_connections == 3
    assert (config.engine.max_queued_requests, config.engine.max_running) == (2, 64)
    own = shares(Config(engine=EngineConfig(engine="synthetic", max_running=64)), 4)
    assert own.engine.max_running == 16
