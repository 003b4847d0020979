"""More than the server can do: case 89 of issue threads, fairness, priorities and deadlines, over real connections."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import httpx
import psutil
import pytest

from tests.clients.h2_client import Client
from tests.protocol import frames as f
from tests.support import STOP_TIMEOUT_S, Server, running

SLOW = ("--synthetic-step-ms", "5", "--synthetic-tokens", "4", "--log-level", "warning")


def metric(server: Server, name: str) -> float:
    page = httpx.get(server.url + "/metrics", timeout=STOP_TIMEOUT_S, trust_env=False).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


@contextlib.contextmanager
def clients(server: Server, *sources: str) -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(closing(Client(server.port, source))) for source in sources]


def test_ten_times_too_much() -> None:
    """429 or 503 with Retry-After before anything is tokenized; what is accepted is answered; memory stays flat."""
    limits = ("--max-running", "4", "--max-queued-requests", "16", "--synthetic-step-ms", "10")
    with running(*limits, "--synthetic-tokens", "4", "--log-level", "warning") as server:
        process, sizes, seen = psutil.Process(server.process.pid), list[int](), Counter[int]()
        for _ in range(4):
            with clients(server, "127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.3") as them:
                for number in range(50):
                    for client in them:
                        client.ask(f"{number} " + "word " * 2000)
                for client in them:
                    client.drain()
                    for answer in client.answers.values():
                        seen[answer.status] += 1
                        if answer.status == 200:
                            assert answer.events[-1] == "[DONE]"
                        else:
                            assert 1 <= int(answer.headers["retry-after"]) <= 60
                            assert answer.code in ("queue_share", "queue_full")
            sizes.append(process.memory_info().rss)
        assert set(seen) <= {200, 429, 503}
        assert seen[200] >= 4 * 20, "the engine and the queue were full"
        assert seen[429] + seen[503] > 5 * seen[200]
        assert max(sizes[1:]) - sizes[0] < 20 << 20, sizes
        assert metric(server, 'evap_tokens_total{kind="emitted"}') == 5 * seen[200], "4, and the end"
        assert metric(server, 'evap_tokens_total{kind="prompt"}') < 10_100 * seen[200], "none of a refused one's prompt"
        limits_hit = sum(metric(server, f'evap_limit_total{{limit="{name}"}}') for name in
                         ("queue_share", "queue_full", "queue_pushed_out"))  # fmt: skip
        assert limits_hit == seen[429] + seen[503]
        assert metric(server, "evap_waiting") == 0
        assert metric(server, "evap_waiting_tokens") == 0


def test_one_request_beside_a_hundred() -> None:
    with running("--max-running", "1", *SLOW) as server, clients(server, "127.0.0.1", "127.0.0.2") as (hog, other):
        for _ in range(100):
            hog.ask("mine", max_tokens=4)
        hog.wait(lambda: len(hog.finished) >= 2)
        other.ask("and mine", max_tokens=4)
        other.drain()
        assert other.answers[1].status == 200
        before = metric(server, 'evap_exchanges_total{end="length"}')
        assert before < 30, "most of the hundred are still waiting"
        hog.drain()
        assert Counter(answer.status for answer in hog.answers.values()) == {200: 100}


def test_priorities_over_real_frames() -> None:
    with running("--max-running", "1", *SLOW) as server, clients(server, "127.0.0.1") as (client,):
        first = client.ask("running", max_tokens=150, ignore_eos=True)
        client.wait(lambda: client.answers[first].status == 200)
        plain = client.ask("plain", max_tokens=1)
        background = client.ask("background", {"priority": "u=6, i"}, max_tokens=1)
        urgent = client.ask("urgent", {"priority": "u=0"}, max_tokens=1)
        body = client.ask("body", {"priority": "u=7"}, max_tokens=1, priority=-1)
        raised = client.ask("raised", max_tokens=1)
        client.raw(f.priority_update(raised, b"u=1") + f.priority_update(plain, b"u=0 nonsense"))
        client.drain()
        assert client.finished == [first, urgent, raised, body, plain, background]


def test_deadlines() -> None:
    with running("--max-running", "1", *SLOW) as server, clients(server, "127.0.0.1") as (client,):
        long = client.ask("long", {"evap-deadline-ms": "400"}, max_tokens=100_000, ignore_eos=True)
        client.wait(lambda: client.answers[long].status == 200)
        late = client.ask("late", {"evap-deadline-ms": "50"}, max_tokens=4)
        bad = client.ask("bad", {"evap-deadline-ms": "soon"}, max_tokens=4)
        kept = client.ask("kept", {"evap-deadline-ms": "60000"}, max_tokens=4)
        client.drain()
        answers = client.answers
        assert (answers[late].status, answers[late].code) == (504, "deadline_exceeded")
        assert answers[late].headers["x-should-retry"] == "false"
        assert answers[bad].status == 400
        assert answers[long].events[-2]["error"]["code"] == "deadline_exceeded"
        assert answers[long].events[-1] == "[DONE]"
        assert answers[kept].events[-2]["choices"][0]["finish_reason"] == "length"
        assert client.finished[-2:] == [long, kept], "its place was free as soon as its time was up"
        assert metric(server, 'evap_limit_total{limit="deadline"}') == 2


def test_a_deadline_that_the_queue_cannot_keep() -> None:
    """Refused at once, by the queue's pace, and not when its time is up: here 5 ms a token, 4 tokens a request."""
    with running("--max-running", "1", *SLOW) as server, clients(server, "127.0.0.1") as (client,):
        many = [client.ask(f"r{number}", max_tokens=4) for number in range(80)]
        client.wait(lambda: len(client.finished) >= 15)
        late = client.ask("late", {"evap-deadline-ms": "200"}, max_tokens=4)
        kept = client.ask("kept", {"evap-deadline-ms": "600000"}, max_tokens=4)
        client.drain()
        assert (client.answers[late].status, client.answers[late].code) == (504, "deadline_exceeded")
        assert int(client.answers[late].headers["retry-after"]) >= 1
        assert client.finished.index(late) < 40, "the queue was still long"
        assert [sid for sid in client.finished if sid != late] == [*many, kept]
        assert metric(server, 'evap_limit_total{limit="deadline"}') == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_worker_that_vanishes_before_the_first_token(stream: bool) -> None:
    options = ("--model", "synthetic-faults", "--ttft-timeout", "0.5", "--max-running", "1", *SLOW)
    with running(*options) as server, clients(server, "127.0.0.1") as (client,):
        sid = client.ask("fault:hang", stream=stream)
        waiting = client.ask("behind it")
        client.drain()
        if stream:
            assert client.answers[sid].events[-2]["error"]["code"] == "ttft_timeout"
        else:
            assert (client.answers[sid].status, client.answers[sid].code) == (504, "ttft_timeout")
        assert (client.answers[waiting].status, client.answers[waiting].code) == (504, "ttft_timeout")
        assert metric(server, 'evap_limit_total{limit="ttft"}') == 2


def test_what_is_cut_short_never_looks_complete() -> None:
    """An engine that dies in mid-stream: events have room for an error; raw text and token ids are broken off."""
    options = ("--model", "synthetic-faults", *SLOW)
    with running(*options) as server, clients(server, "127.0.0.1") as (client,):
        url, body = (
            server.url + "/v1/completions",
            {"prompt": "cut", "stream": True, "max_tokens": 5000, "ignore_eos": True},
        )
        with httpx.stream("POST", url, json=body, headers={"accept": "text/plain"}, timeout=STOP_TIMEOUT_S) as raw:
            kinds = ("text/plain", "application/vnd.evap.tokens", "text/event-stream")
            sids = [client.ask("cut", {"accept": kind}, max_tokens=5000, ignore_eos=True) for kind in kinds]
            client.wait(lambda: all(client.answers[sid].body for sid in sids))
            client.ask("fault:fail", max_tokens=5000, ignore_eos=True)
            client.drain()
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                raw.read()
        text, ids, events = (client.answers[sid] for sid in sids)
        assert [(a.status, a.ended, a.reset) for a in (text, ids)] == [(200, False, 2)] * 2
        assert (events.ended, events.reset) == (True, None)
        assert events.events[-2]["error"]["code"] == "engine_failed"


def test_connections_of_one_address() -> None:
    with (
        running("--max-connections-per-address", "2", *SLOW) as server,
        clients(server, "127.0.0.2", "127.0.0.2") as both,
    ):
        for client in both:
            client.ask("hello", max_tokens=1)
            client.drain()
        with closing(Client(server.port, "127.0.0.2")) as third:
            assert third.closed_by_server().startswith(b"HTTP/1.1 503 ")
        with clients(server, "127.0.0.3") as (other,):
            other.ask("hello", max_tokens=1)
            other.drain()
        both[0].close()
        assert metric(server, 'evap_limit_total{limit="connections_per_address"}') == 1
