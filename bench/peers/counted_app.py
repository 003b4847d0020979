"""bench.peers.asgi_app, and how often it was started: GET /count."""

from __future__ import annotations

from typing import Any

from bench.peers.asgi_app import app as streaming

STARTED = [0]


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http" and scope["path"] == "/count":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"%d" % STARTED[0]})
        return
    if scope["type"] == "http":
        STARTED[0] += 1
    await streaming(scope, receive, send)
