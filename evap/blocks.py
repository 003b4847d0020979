"""What was pushed, kept for a while, so that the GET that was promised is really answered (RFC 9113 8.4).

A block is complete once all of it was sent on its own stream. Before that a GET waits for its end: what a client gets
here was delivered, and counted, before; a block that breaks off is not there any more, and never comes in part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from evap.errors import NotFound, echo
from evap.protocol.events import Reply

#: Charged for each block beside its octets.
OVERHEAD: Final = 1024
#: Waiting requests of a block beyond which it looks for those that have left.
MANY_WAITING: Final = 16

Answer = Callable[[Reply, bytes | None], None]


class Block:
    """One pushed body: an events.Keep."""

    __slots__ = ("_parts", "_store", "_waiting", "complete", "expires_ns", "key", "path", "size")

    def __init__(self, store: BlockStore, path: str, key: str) -> None:
        self.path = path
        self.key = key  #: the API key's id, "" without keys
        self.size = OVERHEAD
        self.complete = False
        self.expires_ns = 0
        self._store = store
        self._parts: list[bytes] = []
        self._waiting: list[tuple[Reply, Answer]] = []

    def add(self, data: bytes) -> None:
        if self._store.grow(self, len(data)):
            self._parts.append(data)

    def close(self, complete: bool) -> None:
        if complete and self._store.finish(self):
            self.complete = True
            self._parts = [b"".join(self._parts)]
            self._tell(self._parts[0])
        else:
            self._store.drop(self)

    def gone(self) -> None:
        """It is not kept any more."""
        self._parts = []
        self._tell(None)

    def ask(self, reply: Reply, answer: Answer) -> None:
        """Call `answer` with the whole body, or with None if it never will be; now or later."""
        if self.complete:
            answer(reply, self._parts[0])
            return
        if len(self._waiting) >= MANY_WAITING:
            self._waiting = [entry for entry in self._waiting if entry[0].alive]
        self._waiting.append((reply, answer))

    def _tell(self, body: bytes | None) -> None:
        waiting, self._waiting = self._waiting, []
        for reply, answer in waiting:
            answer(reply, body)


class BlockStore:
    """All blocks of a process: at most `limit` octets, `keep_ns` after their end. The oldest of these make room."""

    def __init__(self, *, limit: int, keep_ns: int, now_ns: Callable[[], int]) -> None:
        self._limit = limit
        self._keep_ns = keep_ns
        self._now_ns = now_ns
        self._blocks: dict[str, Block] = {}
        self._complete: deque[Block] = deque()  # by age
        self.size = 0

    def open(self, path: str, key: str) -> Block:
        """A block that grows from now on. It may be dropped at any time: it is then no longer found."""
        block = Block(self, path, key)
        self._blocks[path] = block
        self.size += block.size
        self._fit(block)
        return block

    def fetch(self, path: str, key: str, reply: Reply, answer: Answer) -> None:
        """See Block.ask. Raises NotFound, also for what belongs to another key."""
        self.sweep()
        block = self._blocks.get(path)
        if block is None or block.key != key:
            raise NotFound(f"there is no '{echo(path)}' here, or no longer")
        block.ask(reply, answer)

    def sweep(self) -> None:
        """Forget what is too old."""
        now_ns = self._now_ns()
        while self._complete and self._complete[0].expires_ns <= now_ns:
            self.drop(self._complete.popleft())

    # What blocks ask for

    def grow(self, block: Block, size: int) -> bool:
        """False if it is not kept (any more)."""
        if self._blocks.get(block.path) is not block:
            return False
        block.size += size
        self.size += size
        return self._fit(block)

    def _fit(self, block: Block) -> bool:
        while self.size > self._limit and self._complete:
            self.drop(self._complete.popleft())
        if self.size > self._limit:
            self.drop(block)
            return False
        return True

    def finish(self, block: Block) -> bool:
        """False if it is not kept."""
        if self._blocks.get(block.path) is not block:
            return False
        block.expires_ns = self._now_ns() + self._keep_ns
        self.sweep()
        self._complete.append(block)
        return True

    def drop(self, block: Block) -> None:
        if self._blocks.get(block.path) is block:
            del self._blocks[block.path]
            self.size -= block.size
            block.gone()
