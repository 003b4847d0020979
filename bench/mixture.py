"""A client with a script: exchanges of every kind, for bench.reconcile."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import tiny_llama
from evap.metering import keys
from tests.metering.wire_client import Stream, WireClient
from tests.support import Server

AT_ONCE = 40
KINDS = ("complete", "complete", "early", "late", "stop", "token", "three", "whole")


@dataclass(frozen=True)
class Engine:
    """How one engine is started, asked and killed."""

    flags: tuple[str, ...]
    asked: dict[str, Any]  # of every request
    stop: tuple[str, ...]
    stop_token: int
    forever: int
    budget: int


def synthetic() -> Engine:
    flags = ("--engine", "synthetic", "synthetic-faults", "--synthetic-step-ms", "1")
    return Engine(flags, {}, ("d wo",), ord("d"), 100_000, 60)


def torch(model: Path) -> Engine:
    path = tiny_llama.build(model, letters=True)
    flags = ("--engine", "torch", str(path), "--threads", "1")
    return Engine(flags, {"top_k": 20}, ("e", "th", "Q"), tokens_of(path)["a"], 3500, 200)


def tokens_of(path: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    return found


class Run:
    """A client with a script, over as many lives of the server as it takes."""

    def __init__(self, folder: Path, engine: Engine, exchanges: int) -> None:
        self.random = random.Random(7)
        self.folder = folder / "data"
        self.engine = engine
        self.exchanges = exchanges
        file = folder / "keys.toml"
        self.key = keys.create(file, "rich", {})
        self.poor = [keys.create(file, f"poor-{i}", {"tokens_per_day": engine.budget}) for i in range(exchanges // 10)]
        self.flags = (
            *engine.flags, "--port", "0", "--reset-burst", "100000", "--control-burst", "100000",
            "--data-dir", str(self.folder), "--api-keys", str(file),
        )  # fmt: skip
        self.seen: list[Stream] = []

    @property
    def in_process(self) -> bool:
        return "synthetic" in self.engine.flags

    def start(self) -> Server:
        server = Server(*self.flags)
        server.wait_ready()
        return server

    def ask(self, client: WireClient, kind: str) -> None:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "canary:word please"}], "stream": True, "ignore_eos": True,
            "max_tokens": self.random.randint(20, 60), "stream_options": {"include_usage": True}, **self.engine.asked,
        }  # fmt: skip
        stream, key = Stream(kind), self.key
        if kind == "early":
            stream.on_event = lambda s: s.chars >= 1
        elif kind == "late":
            most = body["max_tokens"]
            stream.on_event = lambda s: s.chars >= most - 5
        elif kind == "stop":
            body["stop"] = list(self.engine.stop)
        elif kind == "token":
            body["stop_token_ids"] = [self.engine.stop_token]
        elif kind == "three":
            body["n"] = 3
        elif kind == "budget":
            key, body["max_tokens"] = self.poor.pop(), self.engine.forever
        elif kind == "whole":
            body["stream"] = False
            del body["stream_options"]
        elif kind == "forever":
            body["max_tokens"] = self.engine.forever
        elif kind == "harm":
            body["messages"][0]["content"] += " fault:fail"
        self.seen.append(stream)
        client.ask(stream, body, key)

    def phase(self, server: Server, kinds: list[str]) -> WireClient:
        client = WireClient(server.port)
        for kind in kinds:
            client.run(lambda: client.open < AT_ONCE)
            self.ask(client, kind)
        return client


def script(count: int, random_: random.Random) -> list[str]:
    found = [random_.choice(KINDS) for _ in range(count)]
    for number in range(0, count, 20):
        found[number] = "budget"
    return found
