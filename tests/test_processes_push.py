"""Pushed answers of a server of several processes: the promised GET is answered by whichever process it comes to."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, PushedStreamReceived, StreamEnded

from evap.identity import maker
from evap.metering import keys
from tests.clients.asking import chat, eventually
from tests.many import StartServer, key_file, loops, numbers
from tests.support import STOP_TIMEOUT_S, Server


class Pushed:
    """One answer of two choices and its usage: `bodies` by path, as they were pushed; `read` returns when they end."""

    def __init__(self, server: Server, secret: str, tokens: int, prompt: str = "push") -> None:
        self.conn = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.conn.initiate_connection()
        self.conn.increment_flow_control_window(1 << 30)
        self.paths: dict[int, str] = {}
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()
        head = {":method": "POST", ":scheme": "http", ":authority": "evap.test", ":path": "/v1/chat/completions"}
        head |= {"content-type": "application/json", "evap-push": "blocks", "authorization": f"Bearer {secret}"}
        self.conn.send_headers(1, list(head.items()))
        body = chat(prompt, tokens, n=2, ignore_eos=True, stream_options={"include_usage": True})
        self.conn.send_data(1, body, end_stream=True)
        self.socket = socket.create_connection((server.host, server.port), STOP_TIMEOUT_S)
        while len(self.paths) < 2:
            self.pump()

    def pump(self) -> None:
        self.socket.sendall(self.conn.data_to_send())
        data = self.socket.recv(1 << 16)
        assert data, "the server closed the connection"
        for event in self.conn.receive_data(data):
            match event:
                case PushedStreamReceived(pushed_stream_id=sid, headers=headers):
                    self.paths[int(sid or 0)] = {str(n): str(v) for n, v in headers or ()}[":path"]
                case DataReceived(stream_id=sid, data=part, flow_controlled_length=size):
                    self.data[int(sid or 0)] = self.data.get(int(sid or 0), b"") + (part or b"")
                    self.conn.acknowledge_received_data(size or 0, int(sid or 0))
                case StreamEnded(stream_id=sid):
                    self.ended.add(int(sid or 0))

    def read(self) -> dict[str, bytes]:
        while not {1, *self.paths} <= self.ended:
            self.pump()
        self.socket.close()
        return {path: self.data[sid] for sid, path in self.paths.items()}


def get(server: Server, path: str, secret: str) -> httpx.Response:
    """Over a connection of its own, so that any process may get it."""
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.get(server.url + path, headers=headers, timeout=STOP_TIMEOUT_S, trust_env=False)


def test_every_process_has_the_same_block_for_its_key_only(start_server: StartServer, tmp_path: Path) -> None:
    path, secret = key_file(tmp_path)
    other = keys.create(Path(path), "bob", {})
    server = start_server("--workers", "3", "--synthetic-step-ms", "0", "--api-keys", path)
    bodies = Pushed(server, secret, 2000).read()
    assert len(bodies) == 3
    assert max(map(len, bodies.values())) > 128 << 10, "more than one piece"
    for _ in range(8):
        assert {where: get(server, where, secret).content for where in bodies} == bodies
        assert {get(server, where, other).status_code for where in bodies} == {404}
    assert {get(server, next(iter(bodies))[:-1] + "7", secret).status_code for _ in range(6)} == {404}
    assert get(server, next(iter(bodies)), "wrong").status_code == 401


def test_a_block_that_still_runs_is_waited_for_everywhere(start_server: StartServer, tmp_path: Path) -> None:
    path, secret = key_file(tmp_path)
    server = start_server("--workers", "2", "--synthetic-step-ms", "5", "--api-keys", path)
    pushed = Pushed(server, secret, 150)
    first = pushed.paths[min(pushed.paths)]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(get, server, first, secret) for _ in range(8)]
        bodies = pushed.read()
        assert [answer.result().content for answer in waiting] == [bodies[first]] * 8


def test_when_its_process_is_killed_a_block_is_gone_for_all(start_server: StartServer, tmp_path: Path) -> None:
    path, secret = key_file(tmp_path)
    server = start_server("--workers", "2", "--synthetic-step-ms", "0", "--api-keys", path)
    where, body = next(iter(Pushed(server, secret, 20).read().items()))
    assert get(server, where, secret).content == body
    number = maker(where.split("/")[-3])
    victim = sorted(loops(server), key=psutil.Process.create_time)[number]  # they are started in this order
    victim.kill()
    server.wait_log(f"loop process {number} ended")
    eventually(lambda: numbers(server, secret)["evap_loop_processes"] == 2, "a new one", STOP_TIMEOUT_S)
    fresh = Pushed(server, secret, 20).read()
    assert all(get(server, path, secret).content == data for path, data in fresh.items())
    # Whoever had fetched it before may have kept it; nobody has anything else, and none of it in part.
    answers: list[httpx.Response] = []

    def gone_now() -> bool:
        answers.append(get(server, where, secret))
        return answers[-1].status_code == 404

    eventually(gone_now, "it is gone")
    assert {a.status_code for a in answers} <= {200, 404}
    assert {a.content for a in answers if a.status_code == 200} <= {body}
    gone = [json.loads(a.content)["error"]["message"] for a in answers if a.status_code == 404]
    assert all("no longer" in message for message in gone)
