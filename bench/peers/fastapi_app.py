"""The shape of vLLM's own server: FastAPI, a pydantic model per request and per chunk, a queue per request."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from bench.peers.toy import WORDS, ToyEngine

app = FastAPI()
engine = ToyEngine()


class Message(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    model: str | None = None
    messages: list[Message]
    max_tokens: int = 128
    temperature: float = 1.0
    stream: bool = False
    ignore_eos: bool = False


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class Choice(BaseModel):
    index: int
    delta: Delta
    finish_reason: str | None = None


class Chunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Choice]


async def stream(request: ChatRequest) -> AsyncIterator[str]:
    queue = engine.add(request.max_tokens)
    name, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def event(delta: Delta, reason: str | None = None) -> str:
        chunk = Chunk(
            id=name, created=created, model="synthetic", choices=[Choice(index=0, delta=delta, finish_reason=reason)]
        )
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"

    yield event(Delta(role="assistant", content=""))
    while (token := await queue.get()) >= 0:
        yield event(Delta(content=WORDS[token]))
    yield event(Delta(), "length")
    yield "data: [DONE]\n\n"


@app.post("/v1/chat/completions")
async def chat(request: ChatRequest) -> StreamingResponse:
    return StreamingResponse(stream(request), media_type="text/event-stream")
