"""Where the bytes of a streamed answer's choices go: all to its own reply, or each to a pushed one.

Rule: an outlet knows which of its bytes complete which tokens, so a choice's delivered count is what was delivered on
its own stream.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

from evap.blocks import BlockStore
from evap.choice import ChoiceRun
from evap.protocol.api.sse import STREAM_TYPE
from evap.protocol.events import HeaderList, Reply, RequestHead

#: of a pushed answer, and of the same answer fetched again
BLOCK_HEADERS: Final = ((b"content-type", STREAM_TYPE), (b"cache-control", b"private, max-age=60"))

_MARK: Final = 3  # numbers of one mark
_STALE: Final = 64 * _MARK  # of them are settled before their memory is given back


class Outlet:
    """A reply, and what of it was delivered."""

    __slots__ = ("_at", "_choices", "_marks", "_queued", "reply")

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self._queued = 0  # body bytes given to the reply
        # Not yet known delivered, from `_at` on: queued bytes, the choice's index, tokens; and again. A slow reader has
        # hundreds of them, so they are numbers and no objects.
        self._marks = array("q")
        self._at = 0
        self._choices: dict[int, ChoiceRun] = {}

    def send(self, data: bytes) -> None:
        if data:
            self._queued += len(data)
            self.reply.send(data)

    def whole(self, headers: HeaderList, body: bytes) -> None:
        self._queued += len(body)
        self.reply.whole(200, headers, body)

    def mark(self, choice: ChoiceRun, tokens: int) -> None:
        """The bytes sent so far complete `tokens` more tokens of the choice."""
        choice.unmarked = 0
        choice.marked += tokens
        if not self._marks and not self.reply.buffered:
            choice.delivered += tokens
            return
        self._choices[choice.index] = choice
        self._marks.extend((self._queued, choice.index, tokens))
        self.settle()

    def settle(self) -> None:
        """Tokens whose last byte has been taken by the transport are delivered."""
        marks, at = self._marks, self._at
        if not marks:
            return
        gone, size = self._queued - self.reply.buffered, len(marks)
        while at < size and marks[at] <= gone:
            self._choices[marks[at + 1]].delivered += marks[at + 2]
            at += _MARK
        if at == size:
            self._choices.clear()  # a choice knows its outlet: the two would wait for the collector, with the prompt
        if at == size or at >= _STALE:
            del marks[:at]
            at = 0
        self._at = at

    def lose(self) -> None:
        """What is queued now is thrown away: never delivered."""
        self.settle()
        for at in range(self._at, len(self._marks), _MARK):
            self._choices[self._marks[at + 1]].marked -= self._marks[at + 2]
        del self._marks[:]
        self._choices.clear()
        self._at = 0


class Offer:
    """A request whose blocks may be pushed: each choice, by its index, and the usage record after them."""

    __slots__ = ("_key", "_path", "_store")

    def __init__(self, store: BlockStore, path: str, key: str) -> None:
        self._store = store
        self._path = path
        self._key = key

    def outlet(self, main: Outlet, index: int) -> Outlet | None:
        """Promise a block, name it on the main stream, and begin it. None: it has to go inline."""
        if not main.reply.pushable:
            return None
        path = f"{self._path}/{index}"
        block = self._store.open(path, self._key)
        reply = main.reply.push(path.encode(), block)
        if reply is None:
            block.close(False)
            return None
        name = {"object": "evap.block", "index": index, "path": path}
        main.send(b"data: %b\n\n" % msgspec.json.encode(name))
        reply.owner = main.reply.owner
        reply.start(200, BLOCK_HEADERS)
        return Outlet(reply)


class Outlets:
    """Those of one exchange. `main` is the reply to the request itself; `offer` is set if the others may be pushes."""

    __slots__ = ("main", "offer", "open")

    def __init__(self, reply: Reply) -> None:
        self.main = Outlet(reply)
        self.open = [self.main]  #: that somebody reads, or has read
        self.offer: Offer | None = None

    def headers(self, head: RequestHead) -> HeaderList:
        """What a request that asks for pushes is told: whether there may be any."""
        if head.get(b"evap-push") is None:
            return ()
        return ((b"evap-push", b"on" if self.offer is not None else b"off"),)

    def begin(self) -> None:
        """Before the head of a streamed answer."""
        if self.offer is not None and not self.main.reply.pushable:
            self.offer = None

    def place(self, index: int) -> Outlet:
        """Where block `index` goes: the one place that knows of the two forms of an answer."""
        outlet = self.offer.outlet(self.main, index) if self.offer is not None else None
        if outlet is None:
            return self.main
        self.open.append(outlet)
        return outlet

    def end(self, outlet: Outlet) -> None:
        """A block is complete."""
        if outlet is not self.main:
            outlet.reply.end()

    def fail(self, event: bytes) -> None:
        """Whatever has not ended is told of an error."""
        for outlet in self.open:
            if outlet.reply.alive:
                outlet.send(event)
                self.end(outlet)

    def lose(self, reply: Reply) -> Outlet | None:
        """The client does not want this push."""
        found = next((outlet for outlet in self.open if outlet.reply is reply), None)
        if found is not None:
            found.lose()
            self.open.remove(found)
        return found

    def settle(self) -> None:
        for outlet in self.open:
            outlet.settle()

    @property
    def drained(self) -> bool:
        """No byte that could still be delivered."""
        return all(outlet.reply.buffered == 0 for outlet in self.open)
