"""The h2 library as its documentation shows it: `send_data` per token, one write per connection and step."""

from __future__ import annotations

import asyncio
import json
import sys

import h2.config
import h2.connection
import h2.events
import uvloop

from bench.peers.toy import DONE, EVENTS, STEP_S

RUNNING: dict[Connection, dict[int, int]] = {}


class Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.h2.initiate_connection()
        self.bodies: dict[int, bytes] = {}
        transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                self.bodies[event.stream_id] = b""
            elif isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                tokens = json.loads(self.bodies.pop(event.stream_id))["max_tokens"]
                self.h2.send_headers(event.stream_id, [(b":status", b"200"), (b"content-type", b"text/event-stream")])
                RUNNING.setdefault(self, {})[event.stream_id] = tokens
        self.transport.write(self.h2.data_to_send())

    def connection_lost(self, exc: Exception | None) -> None:
        RUNNING.pop(self, None)


async def steps() -> None:
    while True:
        for connection, streams in list(RUNNING.items()):
            for stream, left in list(streams.items()):
                connection.h2.send_data(stream, EVENTS[left % len(EVENTS)])
                streams[stream] = left - 1
                if left == 1:
                    connection.h2.send_data(stream, DONE, end_stream=True)
                    del streams[stream]
            connection.transport.write(connection.h2.data_to_send())
            if not streams:
                del RUNNING[connection]
        await asyncio.sleep(STEP_S if RUNNING else 0.001)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(server.serve_forever(), steps())


uvloop.run(main())
