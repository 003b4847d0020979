"""Many at once: streams above the limit, clients that close in mid-stream, slow readers, and SIGTERM under streams."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from tests.clients.asking import SOON_S, chat, eventually, gauge, program, running, said, text_of
from tests.conformance.test_sections import Peer
from tests.protocol import frames as f
from tests.support import STOP_TIMEOUT_S, Server

JSON = {"content-type": "application/json"}
WIDE = (1 << 31) - 1
PATH = [*f.POST, (b"content-type", b"application/json")]


def test_500_requests_on_a_connection_that_takes_100(start_server: Callable[..., Server]) -> None:
    """httpcore issue 248: a client that knows our limit waits for a free stream, and none of its requests is lost."""
    server = start_server("--synthetic-step-ms", "1", "--max-concurrent-streams", "100", "--max-running", "100")

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(
            base_url=server.url, headers=JSON, http1=False, http2=True, limits=limits, timeout=6 * SOON_S
        ) as client:
            await client.get("/health")  # the connection, and our SETTINGS
            return await asyncio.gather(
                *(client.post("/v1/chat/completions", content=chat(f"n{n}", 8)) for n in range(500))
            )

    answers = asyncio.run(ask())
    assert [text_of(answer.content) for answer in answers] == [said(f"n{n}", 8) for n in range(500)]


def test_a_burst_above_the_limit_is_refused_stream_by_stream(start_server: Callable[..., Server]) -> None:
    """A first burst, before the client knows our limit: the excess is REFUSED_STREAM (not processed, may be repeated),
    and what it repeats on the same connection, a hundred at a time now, is answered."""
    server = start_server("--synthetic-step-ms", "1", "--max-concurrent-streams", "100", "--max-running", "100")
    peer = Peer(server.port, tls=False)
    left, sid = 500, 1
    ended: set[int] = set()
    peer.socket.sendall(f.PREFACE + f.settings((4, WIDE)) + f.window(0, WIDE - 65_535))
    while left:
        wave = range(sid, sid + 2 * (left if sid == 1 else min(left, 100)), 2)
        sid = wave.stop
        peer.socket.sendall(b"".join(f.headers(s, PATH) + f.data(s, chat("b", 4), end=True) for s in wave))
        refused: set[int] = set()
        while len(ended & set(wave)) + len(refused) < len(wave):
            peer.out.clear()
            peer.read()
            assert peer.open
            ended |= {o.sid for o in peer.out if o.type in (f.DATA, f.HEADERS) and o.flags & f.END_STREAM}
            resets = [o for o in peer.out if o.type == f.RST_STREAM]
            assert {o.number for o in resets} <= {7}, "bodies that were on their way are ignored"
            refused |= {o.sid for o in resets}
        left -= len(wave) - len(refused)
        assert left <= 400
        peer.socket.sendall(f.settings_ack() if wave.start == 1 else b"")
    assert len(ended) == 500
    peer.socket.close()


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_many_closes_in_mid_stream(start_server: Callable[..., Server], http2: bool) -> None:
    """triton server issue 6576: clients that close after the first token, politely or not."""
    server = start_server("--synthetic-step-ms", "1")
    body = chat("close", 4000, ignore_eos=True)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    whole = f.hello() + f.headers(1, PATH) + f.data(1, body, end=True) if http2 else head + body
    for number in range(1000):
        with socket.create_connection((server.host, server.port), SOON_S) as connection:
            connection.sendall(whole)
            seen = b""
            while b'"content":"c' not in seen:
                seen += connection.recv(65_536)
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close sends RST
    eventually(running(server, 0), "generations are left over")
    assert gauge(server, "evap_open_exchanges") == 0
    assert "Traceback" not in server.log


def test_readers_slower_than_the_engine(start_server: Callable[..., Server]) -> None:
    """opencode pull request 19423: what a slow reader has not taken is bounded, for streams of one connection and for
    connections of curl."""
    server = start_server("--synthetic-step-ms", "0", "--max-running", "64")
    peer = Peer(server.port, tls=False)
    peer.socket.sendall(f.hello())
    curls = [_slow_curl(server) for _ in range(4)]
    try:
        eventually(running(server, 4), "curl did not reach the engine")
        before = gauge(server, "process_resident_memory_bytes")
        body = chat("slow", 3000, ignore_eos=True)
        asked = [f.headers(sid, PATH) + f.data(sid, body, end=True) for sid in range(1, 101, 2)]
        peer.socket.sendall(b"".join(asked))
        eventually(lambda: gauge(server, "evap_open_exchanges") >= 50, "the streams did not arrive")
        eventually(running(server, 0), "the engine waits for a reader", 6 * SOON_S)
        grown = gauge(server, "process_resident_memory_bytes") - before
        assert grown < 10 << 20, grown  # 50 x 570 KB of events were made; 200 streams of 8,000 tokens take 19 MB
        assert gauge(server, "evap_open_exchanges") >= 50, "somebody was cut off"
    finally:
        peer.socket.close()
        for curl in curls:
            curl.kill()
            curl.wait(SOON_S)


def _slow_curl(server: Server) -> subprocess.Popen[bytes]:
    limit = ["--limit-rate", "100", "-H", "content-type: application/json", "-d", chat("slow", 8000, ignore_eos=True)]
    command: list[Any] = [program("curl"), "-sN", "--http2-prior-knowledge", *limit]
    return subprocess.Popen([*command, f"{server.url}/v1/chat/completions"], stdout=subprocess.DEVNULL)


def test_sigterm_with_50_streams(start_server: Callable[..., Server]) -> None:
    """vllm issue 24885: all of them finish, on a connection that sees GOAWAY only after the last one."""
    server = start_server("--synthetic-step-ms", "10")
    peer = Peer(server.port, tls=False)
    peer.socket.sendall(f.PREFACE + f.settings((4, WIDE)) + f.window(0, WIDE - 65_535) + f.settings_ack())
    sids = range(1, 101, 2)
    peer.socket.sendall(b"".join(f.headers(s, PATH) + f.data(s, chat(f"s{s}", 60), end=True) for s in sids))
    eventually(running(server, 50), "the requests did not reach the engine")
    server.process.send_signal(signal.SIGTERM)
    while peer.open:
        peer.read()
    for sid in sids:
        body = b"".join(o.payload for o in peer.out if o.type == f.DATA and o.sid == sid)
        assert text_of(body) == said(f"s{sid}", 60)
    kinds = [(o.type, o.sid) for o in peer.out if o.type == f.GOAWAY or (o.type == f.DATA and o.flags & f.END_STREAM)]
    assert [kind for kind, _ in kinds[:50]] == [f.DATA] * 50, "GOAWAY came under a running stream"
    assert (f.GOAWAY, 0) in kinds
    peer.socket.close()
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_scanners(start_server: Callable[..., Server]) -> None:
    """vllm issue 44486: whatever a scanner sends, the server serves on, and only its own port listens."""
    server = start_server(
        "--synthetic-step-ms", "0", "--preface-timeout", "0.5", "--header-timeout", "0.5", "--idle-timeout", "1"
    )
    chance = random.Random(86)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    openings = (
        b"",
        b"GET / HTTP/1.1\r\n",
        f.PREFACE,
        f.hello(),
        hello,
        b"SSH-2.0-x\r\n",
        b"\x00" * 16,
        b"*1\r\n$4\r\nPING",
    )
    with contextlib.ExitStack() as opened:
        for number in range(80):
            wire = socket.create_connection((server.host, server.port), SOON_S)
            opened.enter_context(wire)
            with contextlib.suppress(ConnectionError):
                wire.sendall(openings[number % len(openings)] + chance.randbytes(chance.choice((0, 1, 30, 3000))))
        answer = httpx.post(f"{server.url}/v1/chat/completions", headers=JSON, content=chat("fine", 30), timeout=SOON_S)
        assert text_of(answer.content) == said("fine", 30)
        eventually(lambda: gauge(server, "evap_connections") <= 1, "scanners are still connected")
    assert "Traceback" not in server.log
    process = psutil.Process(server.process.pid)
    ports = {
        c.laddr.port for p in (process, *process.children(True)) for c in p.net_connections() if c.status == "LISTEN"
    }
    assert ports == {server.port}
