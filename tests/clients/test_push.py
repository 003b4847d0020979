"""Server push with clients that take it (nghttp, node, Java, h2), and with those that do not (curl, httpx, openai)."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, PushedStreamReceived, ResponseReceived, StreamEnded

from tests.clients.asking import HERE, SOON_S, chat, eventually, gauge, node, program, run, running, said
from tests.support import ROOT, STOP_TIMEOUT_S, Server

ASK: dict[str, Any] = {"n": 2, "stream_options": {"include_usage": True}}
HEADERS = ("-H", "content-type: application/json", "-H", "evap-push: blocks")
TOKENS = 60
BODY = chat("push", TOKENS, **ASK)


@pytest.fixture
def paced(start_server: Callable[..., Server]) -> Server:
    return start_server("--synthetic-step-ms", "2")


@pytest.fixture
def body(tmp_path: Path) -> str:
    path = tmp_path / "body.json"
    path.write_bytes(BODY)
    return str(path)


def events(text: str) -> list[dict[str, Any]]:
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part and not part.startswith(":")]
    return [json.loads(part) for part in parts if part != "[DONE]"]


def texts(found: list[dict[str, Any]]) -> dict[int, str]:
    """Choice -> its text, of events that may be several choices'."""
    result: dict[int, str] = {}
    for choice in (c for event in found for c in event.get("choices", ())):
        result[choice["index"]] = result.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return result


def check_pushed(main: str, blocks: dict[str, str]) -> str:
    """A main stream that names what came; returns the answer's id."""
    assert main.endswith("data: [DONE]\n\n")
    named = {event["path"]: event["index"] for event in events(main)}
    assert set(named) == set(blocks)
    assert sorted(named.values()) == [0, 1, 2]
    for path, index in named.items():
        found = events(blocks[path])
        assert path == f"/v1/chat/completions/{found[0]['id']}/blocks/{index}"
        if index < 2:
            assert texts(found) == {index: said("push", TOKENS)}
            assert found[-1]["choices"][0]["finish_reason"] == "length"
        else:
            assert found[0]["usage"]["completion_tokens"] == 2 * TOKENS
    return str(found[0]["id"])


def check_inline(text: str) -> None:
    found = events(text)
    assert text.endswith("data: [DONE]\n\n")
    assert texts(found) == {0: said("push", TOKENS), 1: said("push", TOKENS)}
    assert found[-1]["usage"]["completion_tokens"] == 2 * TOKENS
    assert all(event["object"] == "chat.completion.chunk" for event in found)


def usage(server: Server, id: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/v1/usage/{id}", timeout=SOON_S) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


# Those that take it


def test_nghttp(paced: Server, body: str) -> None:
    log = run(program("nghttp"), "-vn", "-d", body, *HEADERS, f"{paced.url}/v1/chat/completions").stdout.decode()
    log = re.sub(r"\x1b\[\S*?m", "", log)
    assert "evap-push: on" in log
    kinds = re.findall(r"recv (PUSH_PROMISE|HEADERS|DATA) frame <length=\d+, flags=(0x\d+), stream_id=(\d+)>", log)
    assert kinds[1:4] == [("PUSH_PROMISE", "0x04", "13"), ("DATA", "0x00", "13"), ("HEADERS", "0x04", "2")]
    assert [stream for _, flags, stream in kinds if flags == "0x01"].count("13") == 1
    assert len(re.findall(r"promised_stream_id=(2|4|6)\)", log)) == 3
    assert "RST_STREAM" not in log


def test_nghttp_that_wants_none(paced: Server, body: str) -> None:
    check_inline(
        run(program("nghttp"), "--no-push", "-d", body, *HEADERS, f"{paced.url}/v1/chat/completions").stdout.decode()
    )


def test_node(paced: Server) -> None:
    answer = node("push.mjs", paced.url, "take", BODY.decode())
    assert answer["push"] == "on"
    id = check_pushed(answer["main"], answer["blocks"])
    assert usage(paced, id)["delivered"] == 2 * TOKENS
    assert answer["second"] == 200


def test_node_stops_one_choice_of_two(paced: Server) -> None:
    """RST_STREAM on a pushed choice cancels just that one in the engine, and the accounts say so."""
    long = chat("push", 300, ignore_eos=True, **ASK).decode()
    answer = node("push.mjs", paced.url, "cancel", long)
    blocks = {path.rpartition("/")[2]: text for path, text in answer["blocks"].items()}
    whole = events(blocks["0"])
    assert texts(whole) == {0: said("push", 300)}
    assert answer["fetched"] == blocks["0"], "the promised GET is really answered"
    account = usage(paced, whole[0]["id"])
    assert account["end"] == "length"
    assert 300 < account["delivered"] <= account["emitted"] < 500
    assert events(blocks["2"])[0]["usage"]["completion_tokens"] == account["emitted"]
    assert gauge(paced, "evap_push_refused_total") == 1
    eventually(running(paced, 0), "something still runs")


@pytest.mark.parametrize("tokens", [60, 2000])
def test_node_without_a_listener(start_server: Callable[..., Server], tokens: int) -> None:
    """It throws away what is pushed, up to a window of each (64 KiB). The main stream and others never notice; what it
    does not take is given up at the stall timeout."""
    server = start_server("--synthetic-step-ms", "1", "--stall-timeout", "1")
    answer = node("push.mjs", server.url, "silent", chat("push", tokens, ignore_eos=True, **ASK).decode())
    assert answer["push"] == "on"
    assert answer["main"].endswith("data: [DONE]\n\n")
    named = events(answer["main"])
    assert [event["object"] for event in named] == ["evap.block"] * 3
    assert answer["second"] == 200
    assert gauge(server, "evap_push_refused_total") == 0
    eventually(lambda: gauge(server, "evap_open_exchanges") == 0, "an exchange is not settled")
    account = usage(server, named[0]["path"].split("/")[4])
    if tokens == 60:
        assert (account["end"], account["delivered"]) == ("length", 120)
    else:
        assert account["end"] == "stalled"
        assert 400 < account["delivered"] < 1000


def test_node_with_push_switched_off(paced: Server) -> None:
    answer = node("push.mjs", paced.url, "off", BODY.decode())
    assert answer["push"] == "off"
    check_inline(answer["main"])


def test_a_drain_finishes_what_is_pushed(start_server: Callable[..., Server]) -> None:
    server = start_server("--synthetic-step-ms", "10")
    command = [program("node"), str(HERE / "push.mjs"), server.url, "last", BODY.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        eventually(running(server, 2), "the request did not reach the engine")
        server.process.send_signal(signal.SIGTERM)
        answer = json.loads(client.communicate(timeout=SOON_S)[0])
    check_pushed(answer["main"], answer["blocks"])
    assert server.process.wait(STOP_TIMEOUT_S) == 0


@pytest.mark.parametrize("option", ["", "off"])
def test_java(start_server: Callable[..., Server], body: str, option: str) -> None:
    """With a PushPromiseHandler, and without one: it then switches push off."""
    server = start_server("--tls", "self-signed", "--synthetic-step-ms", "1")
    disable = "-Djdk.internal.httpclient.disableHostnameVerification=true"
    command = [program("java"), disable, str(HERE / "Push.java"), server.url, body, *([option] if option else [])]
    answers = dict(part.split("\n", 1) for part in run(*command).stdout.decode().split("\0\n") if part)
    if option:
        check_inline(answers.pop("HTTP_2 off"))
        assert not answers
        return
    main = answers.pop("HTTP_2 on")
    check_pushed(main, {title.removeprefix("GET "): text for title, text in answers.items()})


def test_h2_as_a_client(paced: Server) -> None:
    conn = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    conn.initiate_connection()
    head = {":method": "POST", ":scheme": "http", ":authority": f"{paced.host}:{paced.port}"}
    head |= {":path": "/v1/chat/completions", "content-type": "application/json", "evap-push": "blocks"}
    conn.send_headers(1, list(head.items()))
    conn.send_data(1, BODY, end_stream=True)
    bodies: dict[int, bytes] = {}
    paths: dict[int, str] = {}
    heads: dict[int, dict[Any, Any]] = {}
    ended: set[int] = set()
    with socket.create_connection((paced.host, paced.port), timeout=SOON_S) as connection:
        while 1 not in ended or not set(paths) <= ended:
            connection.sendall(conn.data_to_send())
            data = connection.recv(1 << 16)
            assert data, "the server closed the connection"
            for event in conn.receive_data(data):
                match event:
                    case PushedStreamReceived(pushed_stream_id=sid, headers=headers):
                        paths[int(sid or 0)] = {str(n): str(v) for n, v in headers or ()}[":path"]
                    case ResponseReceived(stream_id=sid, headers=headers):
                        heads[int(sid or 0)] = dict(headers or ())
                    case DataReceived(stream_id=sid, data=part, flow_controlled_length=size):
                        bodies[int(sid or 0)] = bodies.get(int(sid or 0), b"") + (part or b"")
                        conn.acknowledge_received_data(size or 0, int(sid or 0))
                    case StreamEnded(stream_id=sid):
                        ended.add(int(sid or 0))
    check_pushed(bodies[1].decode(), {path: bodies[sid].decode() for sid, path in paths.items()})
    assert {heads[sid]["cache-control"] for sid in paths} == {"private, max-age=60"}
    with urllib.request.urlopen(paced.url + paths[2], timeout=SOON_S) as again:
        assert again.read() == bodies[2], "also over HTTP/1.1, on another connection"


def test_the_example(paced: Server) -> None:
    said = run(program("node"), str(ROOT / "examples" / "push.mjs"), paced.url).stdout.decode()
    assert "status 200, evap-push: on" in said
    assert re.search(r"^block 1: \[cancelled\] \S", said, re.M)
    assert re.search(r"^block 0: \S.{60,}", said, re.M)
    assert re.search(r'^block 2: {"prompt_tokens":\d+', said, re.M)


# Those that do not


@pytest.mark.parametrize("option", ["--http1.1", "--http2-prior-knowledge"])
def test_curl(paced: Server, body: str, option: str) -> None:
    out = run(program("curl"), "-siN", option, *HEADERS, "-d", f"@{body}", f"{paced.url}/v1/chat/completions").stdout
    head, _, answer = out.decode().partition("\r\n\r\n")
    assert re.search("^evap-push: off", head, re.M)
    check_inline(answer)


@pytest.mark.parametrize("http2", [False, True])
def test_httpx_and_openai(paced: Server, http2: bool) -> None:
    fields = {"evap-push": "blocks", "content-type": "application/json"}
    with httpx.Client(base_url=paced.url, headers=fields, timeout=SOON_S, http1=not http2, http2=http2) as client:
        answer = client.post("/v1/chat/completions", content=BODY)
        assert answer.headers["evap-push"] == "off"
        check_inline(answer.text)
    found: dict[int, str] = {}
    with (
        openai.DefaultHttpxClient(http1=not http2, http2=http2) as transport,
        openai.OpenAI(base_url=f"{paced.url}/v1", api_key="any", http_client=transport) as sdk,
    ):
        for chunk in sdk.chat.completions.create(
            model="synthetic", messages=[{"role": "user", "content": "canary:push please"}], max_tokens=TOKENS, n=2,
            stream=True, extra_headers={"evap-push": "blocks"},
        ):  # fmt: skip
            for choice in chunk.choices:
                found[choice.index] = found.get(choice.index, "") + (choice.delta.content or "")
    assert found == {0: said("push", TOKENS), 1: said("push", TOKENS)}
