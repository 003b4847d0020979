"""The h2 library as a blocking client: one connection, many streams, from an address of one's choice."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)

from tests.support import STOP_TIMEOUT_S


@dataclass
class Answer:
    """What came back on one stream."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def over(self) -> bool:
        return self.ended or self.reset is not None

    @property
    def events(self) -> list[Any]:
        parts = [p[6:] for p in self.body.split(b"\n\n") if p.startswith(b"data: ")]
        return ["[DONE]" if part == b"[DONE]" else json.loads(part) for part in parts]

    @property
    def code(self) -> str:
        """Of the error that is the whole answer."""
        code: str = json.loads(self.body)["error"]["code"]
        return code


class Client:
    """`finished`: stream ids in the order of their ends. `gone`: the server has said or done goodbye."""

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), STOP_TIMEOUT_S, source_address=(source, 0))
        self._conn = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._conn.initiate_connection()
        self._conn.increment_flow_control_window(1 << 30)
        self.answers: dict[int, Answer] = {}
        self.finished: list[int] = []
        self.gone = False
        self.flush()

    def flush(self) -> None:
        self._socket.sendall(self._conn.data_to_send())

    def raw(self, data: bytes) -> None:
        """Frames that h2 does not know."""
        self.flush()
        self._socket.sendall(data)

    def ask(self, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> int:
        """Send a completion request; its stream id."""
        body = json.dumps({"prompt": prompt, "stream": True, **fields}).encode()
        sid = self._conn.get_next_available_stream_id()
        self.answers[sid] = Answer()
        head = [
            (":method", "POST"), (":scheme", "http"), (":authority", "evap.test"), (":path", "/v1/completions"),
            ("content-type", "application/json"), ("content-length", str(len(body))), *(headers or {}).items(),
        ]  # fmt: skip
        self._conn.send_headers(sid, head)
        while body:
            size = min(self._conn.local_flow_control_window(sid), self._conn.max_outbound_frame_size, len(body))
            if self.answers[sid].over:
                return sid  # refused before its body was uploaded
            if size <= 0:
                self.flush()
                self._read()
                continue
            self._conn.send_data(sid, body[:size], end_stream=size == len(body))
            body = body[size:]
        self.flush()
        return sid

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            assert not self.gone, "the server closed the connection"
            self._read()

    def drain(self) -> None:
        """All that was asked is answered."""
        self.wait(lambda: all(answer.over for answer in self.answers.values()))

    def _read(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            self.gone = True
            return
        for event in self._conn.receive_data(data):
            self._take(event)
        self.flush()

    def _take(self, event: Event) -> None:
        match event:
            case ResponseReceived(stream_id=sid, headers=headers):
                fields = {str(name): str(value) for name, value in headers}
                self.answers[sid].status, self.answers[sid].headers = int(fields[":status"]), fields
            case DataReceived(stream_id=sid, data=data, flow_controlled_length=size):
                self.answers[sid].body += data
                self._conn.acknowledge_received_data(size, sid)
            case StreamEnded(stream_id=sid):
                self.answers[sid].ended = True
                self.finished.append(sid)
            case StreamReset(stream_id=sid, error_code=error):
                self.answers[sid].reset = int(error)
            case ConnectionTerminated():
                self.gone = True

    def closed_by_server(self) -> bytes:
        """Read to the end; what came that is no HTTP/2."""
        data = b""
        while part := self._socket.recv(1 << 16):
            data += part
        return data

    def close(self) -> None:
        self._socket.close()
