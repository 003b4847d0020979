"""Everything but sockets, with accounts: the real HTTP/2 core, and h2 as clients that take pushes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    PushedStreamReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes

from evap.protocol.connection import Http2Core
from evap.protocol.limits import Shared
from tests.metered import Metered

WIDE = 1 << 20


class Site(Metered):
    """`protocol`: what differs in the cores' configuration."""

    def __init__(self, folder: Path, *, protocol: dict[str, Any] | None = None, **options: Any) -> None:
        lenient: dict[str, Any] = {"control_burst": 100_000, "control_per_s": 1e6}
        super().__init__(folder, ledger=False, protocol=lenient | (protocol or {}), **options)
        self.limits = self.config.protocol
        self.shared = Shared()
        self.clients: list[Client] = []

    def connect(self, key: str = "", **settings: int) -> Client:
        client = Client(self, key, settings)
        self.clients.append(client)
        self.pump()
        return client

    def pump(self) -> None:
        while any([client.carry() for client in self.clients]):
            pass

    def run(self, steps: int = 1) -> None:
        """Engine steps, each with what it writes and what comes back."""
        for _ in range(steps):
            self.loop.run(0.001)
            self.pump()
            self.dispatch.steps.settle_ended()


class Client:
    """A connection. `bodies`, `heads` and `promised` (path -> stream) are what it got; `order` says in which order."""

    def __init__(self, site: Site, key: str, settings: dict[str, int]) -> None:
        self.site = site
        self.key = key
        self.core = Http2Core(site.limits, peer="test", shared=site.shared, now_ns=site._now_ns())
        self.conn = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.conn.initiate_connection()
        if settings:
            self.conn.update_settings({SettingCodes[name.upper()]: value for name, value in settings.items()})
        self.credit = True  # give the connection's window back
        self.bodies: dict[int, bytes] = {}
        self.heads: dict[int, dict[str, str]] = {}
        self.trailers: dict[int, dict[str, str]] = {}
        self.promised: dict[str, int] = {}
        self.requests: dict[int, dict[str, str]] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.order: list[tuple[str, int]] = []

    def carry(self) -> bool:
        """Bytes both ways, once. True if there were any."""
        site, now_ns = self.site, self.site._now_ns()
        data = self.conn.data_to_send()
        for event in self.core.receive(data, now_ns) if data else ():
            site.app.on_event(event)
        out = b"".join(bytes(part) for part in self.core.take_output())
        for event in self.core.written(0, now_ns):
            site.app.on_event(event)
        for seen in self.conn.receive_data(out) if out else ():
            self._see(seen)
        return bool(data or out)

    def _see(self, event: Event) -> None:
        sid = getattr(event, "stream_id", 0) or 0
        match event:
            case DataReceived(data=data, flow_controlled_length=size):
                self.bodies[sid] = self.bodies.get(sid, b"") + (data or b"")
                if self.credit and size:
                    self.conn.increment_flow_control_window(size)
            case PushedStreamReceived(pushed_stream_id=sid, headers=headers):
                sid = int(sid or 0)
                self.requests[sid] = _strings(headers)
                self.promised[self.requests[sid][":path"]] = sid
            case ResponseReceived(headers=headers):
                self.heads[sid] = _strings(headers)
            case TrailersReceived(headers=headers):
                self.trailers[sid] = _strings(headers)
            case StreamEnded():
                self.ended.add(sid)
            case StreamReset(error_code=code):
                self.resets[sid] = int(code)
        self.order.append((type(event).__name__, sid))

    def request(self, method: str, path: str, body: bytes | None, **headers: str) -> int:
        sid = self.conn.get_next_available_stream_id()
        head = {":method": method, ":scheme": "http", ":authority": "node:8000", ":path": path}
        if self.key:
            head["authorization"] = f"Bearer {self.site.secrets[self.key]}"
        fields = [*head.items(), *((name.replace("_", "-"), value) for name, value in headers.items())]
        self.conn.send_headers(sid, fields, end_stream=body is None)
        if body is not None:
            self.conn.send_data(sid, body, end_stream=True)
        self.site.pump()
        return sid

    def ask(
        self, *, path: str = "/v1/chat/completions", push: str = "blocks", te: bool = False, prompt: str = "babel: go",
        **fields: Any,
    ) -> int:  # fmt: skip
        """A streamed answer, with pushes unless `push` is empty."""
        chat = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
        body = {**chat, "stream": True, "ignore_eos": True, **fields}
        headers = ({"evap_push": push} if push else {}) | ({"te": "trailers"} if te else {})
        return self.request("POST", path, json.dumps(body).encode(), content_type="application/json", **headers)

    def get(self, path: str) -> int:
        return self.request("GET", path, None)

    def fetch(self, path: str) -> tuple[str, bytes]:
        """(status, body) of a GET that is answered at once."""
        sid = self.get(path)
        return self.heads[sid][":status"], self.bodies.get(sid, b"")

    def reset(self, sid: int, code: int = 8) -> None:
        self.conn.reset_stream(sid, code)
        self.site.pump()

    def blocks(self, sid: int) -> dict[int, int]:
        """Block -> the promised stream, as the main stream's events name them."""
        named = [e for e in events(self.bodies[sid]) if e.get("object") == "evap.block"]
        return {e["index"]: self.promised[e["path"]] for e in named}


def _strings(headers: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in headers}


def events(body: bytes) -> list[dict[str, Any]]:
    """Parsed events, without [DONE] and comments."""
    parts = [part for part in body.split(b"\n\n") if part and not part.startswith(b":")]
    assert all(part.startswith(b"data: ") for part in parts)
    return [json.loads(part[6:]) for part in parts if part != b"data: [DONE]"]


def of_choice(body: bytes, index: int) -> bytes:
    """The octets of an inline answer that are one choice's."""
    parts = [part + b"\n\n" for part in body.split(b"\n\n") if part]
    return b"".join(p for p in parts if b'"choices":[{"index":%4d,' % index in p)


def said(body: bytes) -> tuple[str, str | None, list[str]]:
    """A choice's text, finish reason, and roles, however many events they came in."""
    choices = [e["choices"][0] for e in events(body)]
    reasons = [c["finish_reason"] for c in choices]
    assert all(reason is None for reason in reasons[:-1])
    text = "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)
    return text, reasons[-1] if reasons else None, [c["delta"]["role"] for c in choices if "role" in c.get("delta", ())]


def inline(site: Site, **fields: Any) -> bytes:
    """The same request's answer to a client that takes no pushes."""
    client = site.connect(initial_window_size=WIDE, enable_push=0)
    sid = client.ask(**fields)
    assert client.heads[sid]["evap-push"] == "off"
    site.run(fields["max_tokens"] + 20)
    return client.bodies[sid]
