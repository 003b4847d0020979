"""What was pushed, kept for a while, so that the GET that was promised is really answered (RFC 9113 8.4).

A block is complete once all of it was sent on its own stream. Before that a GET waits for its end: what a client gets
here was delivered, and counted, before; a block that breaks off is not there any more, and never comes in part.

Of several processes each keeps what it made, and copies of what others made, if they were asked for (`copies.py`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

from evap.errors import EvapError, NotFound, echo
from evap.protocol.events import Reply

#: Charged for each block beside its octets.
OVERHEAD: Final = 1024
#: Waiting requests of a block beyond which it looks for those that have left.
MANY_WAITING: Final = 16
#: The part of the memory that copies may take, if there are several: what was made here keeps the rest.
COPIES: Final = 2

Answer = Callable[[Reply, bytes | EvapError], None]


class Block:
    """One pushed body: an events.Keep."""

    __slots__ = ("_parts", "_store", "_waiting", "complete", "expires_ns", "is_copy", "key", "path", "size")

    def __init__(self, store: BlockStore, path: str, key: str) -> None:
        self.path = path
        self.key = key  #: the API key's id, "" without keys
        self.size = OVERHEAD
        self.complete = False
        self.expires_ns = 0
        self.is_copy = False
        self._store = store
        self._parts: list[bytes] = []
        self._waiting: list[tuple[Reply, Answer]] = []

    @property
    def body(self) -> bytes:
        """All of it, once it is complete."""
        return self._parts[0]

    @property
    def wanted(self) -> bool:
        """Somebody waits for its end."""
        return any(reply.alive for reply, _ in self._waiting)

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

    def gone(self, why: EvapError | None = None) -> None:
        """It is not kept any more."""
        self._parts = []
        self._tell(why or NotFound("this block broke off"))

    def ask(self, reply: Reply, answer: Answer) -> None:
        """Call `answer` with the whole body, or with why it never will be there; now or later."""
        if self.complete:
            answer(reply, self._parts[0])
            return
        if len(self._waiting) >= MANY_WAITING:
            self._waiting = [entry for entry in self._waiting if entry[0].alive]
        self._waiting.append((reply, answer))

    def _tell(self, body: bytes | EvapError) -> None:
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
        self._complete: deque[Block] = deque()  # by age; no copies
        self._copies: list[tuple[int, int, Block]] = []  # a heap, by when they expire
        self._numbers = count()
        self.size = 0
        self._copied = 0  # of it, copies

    def open(self, path: str, key: str) -> Block:
        """A block that grows from now on. It may be dropped at any time: it is then no longer found."""
        block = Block(self, path, key)
        self._blocks[path] = block
        self.size += block.size
        self._fit(block)
        return block

    def find(self, path: str, key: str) -> Block | None:
        """None also for what belongs to another key."""
        self.sweep()
        block = self._blocks.get(path)
        return block if block is not None and block.key == key else None

    def fetch(self, path: str, key: str, reply: Reply, answer: Answer) -> None:
        """See Block.ask. Raises NotFound."""
        block = self.find(path, key)
        if block is None:
            raise missing(path)
        block.ask(reply, answer)

    def sweep(self) -> None:
        """Forget what is too old."""
        now_ns = self._now_ns()
        while self._complete and self._complete[0].expires_ns <= now_ns:
            self.drop(self._complete.popleft())
        while self._copies and self._copies[0][0] <= now_ns:
            self.drop(heapq.heappop(self._copies)[2])

    def left_ns(self, block: Block) -> int:
        """For how long a complete block is kept."""
        return block.expires_ns - self._now_ns()

    # Copies

    def open_copy(self, path: str, key: str) -> Block:
        """For what another process keeps. Nothing is charged for it before `lend`."""
        block = self._blocks[path] = Block(self, path, key)
        block.is_copy, block.size = True, 0
        return block

    def lend(self, copy: Block, size: int) -> bool:
        """Make room for so many octets. A copy makes room for nobody before it expires: who asks for one after the
        other, and reads none, takes no more than this. False: there is no room now."""
        size += OVERHEAD
        room = self._limit // COPIES if self._copied else self._limit
        if self._blocks.get(copy.path) is not copy or self._copied + size > room:
            return False
        self._make_room(size)
        if self.size + size > self._limit:
            return False
        copy.size = size
        self.size += size
        self._copied += size
        return True

    def keep_copy(self, copy: Block, left_ns: int, body: bytes) -> None:
        """It is whole now, and is kept as long as the original."""
        if self._blocks.get(copy.path) is copy:
            copy.complete, copy.expires_ns = True, self._now_ns() + left_ns
            copy._parts = [body]
            heapq.heappush(self._copies, (copy.expires_ns, next(self._numbers), copy))
            copy._tell(body)

    # What blocks ask for

    def grow(self, block: Block, size: int) -> bool:
        """False if it is not kept (any more)."""
        if self._blocks.get(block.path) is not block:
            return False
        block.size += size
        self.size += size
        return self._fit(block)

    def _make_room(self, size: int) -> None:
        while self.size + size > self._limit and self._complete:
            self.drop(self._complete.popleft())

    def _fit(self, block: Block) -> bool:
        self._make_room(0)
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

    def drop(self, block: Block, why: EvapError | None = None) -> None:
        if self._blocks.get(block.path) is block:
            del self._blocks[block.path]
            self.size -= block.size
            self._copied -= block.size if block.is_copy else 0
            block.gone(why)


def missing(path: str) -> NotFound:
    return NotFound(f"there is no '{echo(path)}' here, or no longer")
