"""A bare ASGI app: no validation, no model, no queue; ready bytes, one event a send. The least that a peer can do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bench.peers.toy import DONE, EVENTS, STEP_S

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    tokens = json.loads(body)["max_tokens"]
    await send(HEAD)
    for i in range(tokens):
        await send({"type": "http.response.body", "body": EVENTS[i % len(EVENTS)], "more_body": True})
        await asyncio.sleep(STEP_S)
    await send({"type": "http.response.body", "body": DONE, "more_body": False})
