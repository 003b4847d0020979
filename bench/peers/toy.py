"""What the peers stream: an OpenAI chunk per token, of about the size that evap sends."""

from __future__ import annotations

import asyncio
import json
import os

WORDS = [" the", " quick", " brown", " fox", " jumps", " over", " lazy", " dogs", ".", " and", " then", " again"]
STEP_S = float(os.environ.get("STEP_MS", "0")) / 1e3
PREFIX = (
    b'data: {"id":"chatcmpl-0123456789abcdefghijklmn","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"synthetic","choices":[{"index":0,"delta":{"content":"'
)
TAIL = b'"},"finish_reason":null}]}\n\n'
EVENTS = [PREFIX + json.dumps(w)[1:-1].encode() + TAIL for w in WORDS]
DONE = b"data: [DONE]\n\n"


class ToyEngine:
    """Each step gives each running sequence one token; the next step comes after one pass of the loop (or STEP_MS)."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.Queue[int], int] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, tokens: int) -> asyncio.Queue[int]:
        """A queue that gets `tokens` token numbers, then -1."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        queue: asyncio.Queue[int] = asyncio.Queue()
        self._queues[queue] = tokens
        self._work.set()
        return queue

    async def _run(self) -> None:
        step = 0
        while True:
            await self._work.wait()
            step += 1
            for queue, left in list(self._queues.items()):
                queue.put_nowait(step % len(WORDS))
                if left == 1:
                    queue.put_nowait(-1)
                    del self._queues[queue]
                else:
                    self._queues[queue] = left - 1
            if not self._queues:
                self._work.clear()
            await asyncio.sleep(STEP_S)
