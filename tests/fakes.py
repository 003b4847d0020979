"""A wire core, its replies, and a loop, in memory: what dispatch, steps and rows are tested against without sockets."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evap.protocol.events import HeaderList, RequestHead


@dataclass
class FakeCore:
    """Counts windows the way HTTP/2 does (RFC 9113 6.9) and keeps what rows and replies were given."""

    version: str = "2"
    connection_window: int = 1 << 30
    windows: dict[int, int] = field(default_factory=dict)
    output: list[Any] = field(default_factory=list)
    rows: Any = None
    writable: bool = True
    direct: Any = None
    taken: set[int] = field(default_factory=set)

    def stream_window(self, stream_id: int) -> int:
        return self.windows.get(stream_id, 0)

    def spend(self, stream_id: int, n: int) -> None:
        if stream_id in self.windows:
            self.windows[stream_id] -= n
            assert self.windows[stream_id] >= 0

    def take_rows(self, data: Any, frames: int, charge: int) -> bool:
        assert len(data) % frames == 0
        if self.connection_window < charge or not self.writable:
            return False
        self.connection_window -= charge
        self.output.append(data)
        return True

    def acquire(self, reply: Any) -> int | None:
        if not reply.alive or reply.buffered or not getattr(reply, "started", True):
            return None
        self.taken.add(reply.stream_id)
        return self.windows[reply.stream_id]

    def on_rows(self, stream_id: int, on: bool) -> None:
        assert not on
        self.taken.remove(stream_id)


def frames(core: FakeCore) -> list[tuple[int, bytes]]:
    """(stream, payload) of everything rows appended, parsed by the rules of RFC 9113 4.1."""
    data, out = b"".join(bytes(p) for p in core.output), []
    while data:
        length = int.from_bytes(data[:3], "big")
        assert data[3] == 0, "a row is DATA"
        assert data[4] == 0, "a row never ends a stream"
        assert len(data) >= 9 + length
        out.append((int.from_bytes(data[5:9], "big"), data[9 : 9 + length]))
        data = data[9 + length :]
    return out


class FakeReply:
    """A Reply that keeps what it was given. `stuck`: the reader takes nothing, so sent bytes stay buffered."""

    version = "2"
    pushable = False

    def __init__(self, core: FakeCore, stream_id: int, *, window: int = 1 << 30) -> None:
        self.core: Any = core
        self.stream_id = stream_id
        self.owner: object = None
        self.alive = True
        self.started = False
        self.stuck = False
        self.buffered = 0
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.aborted = self.refused = self.ended = False
        self.trailers: dict[bytes, bytes] = {}
        core.windows[stream_id] = window

    def start(self, status: int, headers: HeaderList) -> None:
        self.status, self.headers, self.started = status, dict(headers), True

    def send(self, data: bytes) -> None:
        if not self.alive:
            return
        if self.core.rows is not None:
            self.core.rows.release(self)
        if self.stuck:
            self.buffered += len(data)
        # As a frame, so that rows and sent bytes are read back in one order.
        self.core.output.append(len(data).to_bytes(3, "big") + b"\0\0" + self.stream_id.to_bytes(4, "big") + data)

    def end(self, trailers: HeaderList = ()) -> None:
        if self.core.rows is not None:
            self.core.rows.release(self)
        self.alive, self.ended, self.trailers = False, True, dict(trailers)

    def whole(self, status: int, headers: HeaderList, body: bytes) -> None:
        self.start(status, headers)
        self.send(body)
        self.end()

    def abort(self) -> None:
        self.end()
        self.ended, self.aborted = False, True

    def refuse(self) -> None:
        self.abort()
        self.refused = True

    def push(self, path: bytes, keep: Any) -> None:
        return None

    # What a client would make of it

    @property
    def body(self) -> bytes:
        return b"".join(payload for stream, payload in frames(self.core) if stream == self.stream_id)

    @property
    def events(self) -> list[Any]:
        """The SSE events: parsed JSON, or the string "[DONE]"; comments are left out."""
        parts = [p for p in self.body.split(b"\n\n") if p and not p.startswith(b":")]
        assert all(p.startswith(b"data: ") for p in parts)
        return ["[DONE]" if p == b"data: [DONE]" else json.loads(p[6:]) for p in parts]

    def text(self, index: int = 0) -> str:
        choices = [c for e in self.events if e != "[DONE]" for c in e.get("choices", ()) if c["index"] == index]
        return "".join(c["delta"].get("content") or "" for c in choices)

    def reasons(self) -> list[tuple[int, str]]:
        choices = [c for e in self.events if e != "[DONE]" for c in e.get("choices", ())]
        return [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"] is not None]


class FakeLoop:
    """call_soon, call_later and time, run by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None], /) -> object:
        entry = (self.now + max(delay, 0.0), next(self._numbers), callback)
        heapq.heappush(self._queue, entry)
        return _Handle(self._queue, entry)

    def call_soon(self, callback: Callable[[], None], /) -> object:
        return self.call_later(0.0, callback)

    def run(self, seconds: float = 3600.0, *, calls: int = 100_000) -> None:
        """Everything that is due within `seconds`."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until and calls:
            when, _, callback = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            callback()
            calls -= 1
        if calls:
            self.now = until


class _Handle:
    def __init__(self, queue: list[Any], entry: Any) -> None:
        self._queue, self._entry = queue, entry

    def cancel(self) -> None:
        if self._entry in self._queue:
            self._queue.remove(self._entry)
            heapq.heapify(self._queue)


def run_now(work: Callable[[], Any], back: Callable[[Any], None]) -> None:
    """For tests without a loop: what a thread would do, at once."""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - judged by whoever gets it
        result = error
    back(result)


def head(method: str = "POST", path: str = "/v1/chat/completions", **headers: str) -> RequestHead:
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return RequestHead(
        method=method, path=path, query="", headers=fields, version="2", scheme="http", authority="x", peer="test",
        index=dict(fields),
    )  # fmt: skip
