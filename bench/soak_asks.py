"""Requests of bench.soak: what is asked, how each is to end, and whether what comes back is right."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

#: Ways that a request may end; `read` to its end is the usual one.
ENDS: Final = ("read",) * 12 + ("reset_now", "reset_soon", "reset_at_first", "stall", "malformed", "unknown_model")
MALFORMED: Final = (
    b"", b"{", b"[]", b'{"messages": 5}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 4000}', b"\xff" * 50,
)  # fmt: skip


@dataclass
class Tally:
    """What the clients saw. tokens: id of an exchange that was read to its end -> tokens of its answer."""

    target: int
    asked: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    canary: int = 0

    @property
    def done(self) -> bool:
        return self.asked >= self.target

    def fault(self, what: str) -> None:
        if len(self.faults) < 50:
            self.faults.append(what)
        self.ended["fault"] += 1


def said(word: str, tokens: int, stop: bool) -> str:
    """The synthetic engine repeats a canary, one byte a token."""
    text = (f"{word} " * (tokens // (len(word) + 1) + 1))[:tokens]
    return text.split(" ", 1)[0] if stop else text


class Ask:
    """One request: what is sent, and whether what came back is right."""

    def __init__(self, tally: Tally, chance: random.Random) -> None:
        tally.asked += 1
        tally.canary += 1
        self.tally = tally
        self.end = chance.choice(ENDS)
        self.word = f"w{tally.canary:x}"
        self.count = chance.choice((1, 2, 4, 8, 8, 16, 40))
        self.n = chance.choice((1, 1, 1, 1, 2, 3))
        self.stop = chance.random() < 0.2
        self.stream = chance.random() < 0.75
        self.status = 0
        self.body = bytearray()
        if self.end == "malformed":
            self.sent = chance.choice(MALFORMED)
            return
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"canary:{self.word} please"}], "max_tokens": self.count,
            "stream": self.stream, "n": self.n, "ignore_eos": True,
        }  # fmt: skip
        if self.stop:
            fields["stop"] = [" "]
        if self.end == "unknown_model":
            fields["model"] = "nobody"
        self.sent = json.dumps(fields).encode()

    def finished(self) -> None:
        """The response is complete."""
        tally, expected = self.tally, {"malformed": (400,), "unknown_model": (404,)}.get(self.end, (200,))
        tally.statuses[str(self.status)] += 1
        if self.status not in expected:
            tally.fault(f"{self.end}: status {self.status} {bytes(self.body[:200])!r}")
            return
        tally.ended[self.end] += 1
        if self.status == 200:
            try:
                self._check()
            except (ValueError, KeyError, AssertionError) as error:
                tally.fault(f"{error!r} in {bytes(self.body[:300])!r}...{bytes(self.body[-200:])!r}")

    def gone(self, how: str) -> None:
        """It ended otherwise."""
        self.tally.ended[f"{self.end}: {how}"] += 1

    def _check(self) -> None:
        texts = dict.fromkeys(range(self.n), "")
        if self.stream:
            events = [e for e in bytes(self.body).split(b"\n\n") if e.startswith(b"data: ")]
            assert events.pop() == b"data: [DONE]", "no [DONE]"
            chunks = [json.loads(e[6:]) for e in events]
            for chunk in chunks:
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
            identity = chunks[0]["id"]
        else:
            answer = json.loads(self.body)
            texts = {c["index"]: c["message"]["content"] for c in answer["choices"]}
            identity = answer["id"]
        right = said(self.word, self.count, self.stop)
        assert texts == dict.fromkeys(range(self.n), right), f"not {right!r} {self.n} times"
        self.tally.tokens[identity] = self.n * len(right)
