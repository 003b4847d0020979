"""An engine's ways to the processes that use it: its parent, and others that the parent attaches.

Each has a socket, a ring and a doorbell of its own (`wire.py`, `ring.py`). A process is told its own slots; the engine
sees them with `base` added, so that those of several processes are different.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import numpy as np

from evap.engine.torch import wire
from evap.engine.torch.records import Records
from evap.errors import OutdatedError
from evap.ring import RingWriter, ring_bytes

_READ_BYTES: Final = 1 << 20
#: Between looks at a ring that is too full for the next step.
FULL_RING_S: Final = 0.001
#: A process whose ring is full for so long is given up, so that the others go on. (The parent's is waited for.)
STUCK_READER_S: Final = 2.0
SLOT_BITS: Final = 16
COLUMNS: Final = ("generation", "token", "index", "flags")
SLOT_MASK: Final = (1 << SLOT_BITS) - 1
_MAX_FDS: Final = 3 * 64


class Work(Protocol):
    """What is asked of an engine here (see `worker.Core`)."""

    @property
    def bound(self) -> int: ...
    def cancel(self, slot: int, generation: int) -> None: ...
    def detach(self, base: int) -> None: ...


class Link:
    """The worker's ends of socket, ring and doorbell. Writes block; reads block only when asked to."""

    def __init__(self, sock: int, memory: int, bell: int, base: int = 0) -> None:
        self._sock, self._memory, self.bell = socket.socket(fileno=os.dup(sock)), memory, bell
        self._frames = wire.to_worker()
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._early: list[wire.ToWorker] = []
        self.fds: list[int] = []  #: received, and not taken yet
        self.base = base
        if base:
            self._sock.settimeout(STUCK_READER_S)  # of writes: reads come after a poll
        self.ring: RingWriter
        self.live: dict[int, int] = {}  #: slot -> generation, of the last use of each

    def fileno(self) -> int:
        return self._sock.fileno()

    def open_ring(self, capacity: int) -> RingWriter:
        """Raises OutdatedError for a ring that another version has made."""
        try:
            self.ring = RingWriter(mmap.mmap(self._memory, ring_bytes(capacity)), capacity)
        except ValueError as error:
            raise OutdatedError(error) from error
        return self.ring

    def boot(self) -> wire.Boot:
        """The first message. Raises OutdatedError when it is of another version's server."""
        try:
            first, *self._early = self.receive(wait=True)
        except msgspec.DecodeError as error:
            raise OutdatedError(error) from error
        if not isinstance(first, wire.Boot):
            raise EOFError
        if first.contract not in ("", wire.CONTRACT):
            raise OutdatedError("the messages between them")
        return first

    def receive(self, *, wait: bool) -> list[wire.ToWorker]:
        """Messages that are there; if `wait`, at least one. Raises EOFError when the other end has closed."""
        messages, self._early = self._early, []
        while self._poll.poll(None if wait and not messages else 0):
            data, fds, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
            if not data:
                raise EOFError
            self.fds += fds
            messages += self._frames.feed(data)
        return messages

    def send(self, message: wire.FromWorker) -> None:
        self._sock.sendall(wire.frame(message))

    def ring_bell(self) -> None:
        os.eventfd_write(self.bell, 1)

    def hang_up(self) -> None:
        """The other end is as good as gone: `receive` finds the end of the socket next."""
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Memory and doorbell stay: whoever passed them closes them."""
        self._sock.close()


class Links:
    """The parent's link, and those of other processes that submit to this engine. linger: told for how many seconds the
    engine may outlive its parent, with each of those."""

    def __init__(self, parent: Link, linger: Callable[[float], None] = lambda seconds: None) -> None:
        self.parent = parent
        self.linger = linger
        self._alone = False  # the parent is gone
        self.others: dict[int, Link] = {}  # base -> link
        self._count = 0
        self._poll = select.poll()
        self._poll.register(parent, select.POLLIN)

    def receive(self, *, wait: bool) -> list[tuple[Link, wire.ToWorker | None]]:
        """(link, message); None: that process is gone, or sent nonsense. Raises EOFError when the parent is gone, and
        nobody else is left."""
        if not self.others:
            return [(self.parent, message) for message in self.parent.receive(wait=wait)]
        self._poll.poll(None if wait else 0)
        found: list[tuple[Link, wire.ToWorker | None]] = [(self.parent, m) for m in self._from_parent()]
        for link in list(self.others.values()):
            try:
                found += [(link, message) for message in link.receive(wait=False)]
            except (EOFError, OSError, ValueError, msgspec.DecodeError):
                found.append((link, None))
        return found

    def _from_parent(self) -> list[wire.ToWorker]:
        """Without it there is nobody to start again what dies: the others finish what runs, and go."""
        try:
            return [] if self._alone else self.parent.receive(wait=False)
        except (EOFError, ConnectionError):
            self._alone = True
            self._poll.unregister(self.parent)
            return []

    def attach(self, capacity: int) -> int:
        """The three descriptors that came with the message; the new link's base."""
        self._count += 1
        base = self._count << SLOT_BITS
        sock, memory, bell = self.parent.fds[:3]
        del self.parent.fds[:3]
        link = self.others[base] = Link(sock, memory, bell, base)
        link.open_ring(capacity)
        os.close(sock)
        os.close(memory)
        self._poll.register(link, select.POLLIN)
        return base

    def tell_kv_usage(self, share: float) -> None:
        """In every ring's header."""
        self.parent.ring.tell_kv_usage(share)
        for link in self.others.values():
            link.ring.tell_kv_usage(share)

    def beat(self) -> None:
        """A layer is computed: in every ring's header."""
        self.parent.ring.beat()
        for link in self.others.values():
            link.ring.beat()

    def tell_step(self, since_ns: int) -> None:
        """A step begins (0: has ended): in every ring's header."""
        self.parent.ring.tell_step(since_ns)
        for link in self.others.values():
            link.ring.tell_step(since_ns)

    def drop(self, link: Link) -> None:
        self._poll.unregister(link)
        del self.others[link.base]
        link.close()
        link.ring.close()
        os.close(link.bell)

    def close(self) -> None:
        """Of others, at the end."""
        for link in list(self.others.values()):
            self.drop(link)


def give_up(engine: Work, link: Link, links: Links) -> None:
    """A process is gone, or as good as gone: nobody waits for what it asked for."""
    links.drop(link)
    for slot, generation in link.live.items():
        engine.cancel(link.base + slot, generation)
    engine.detach(link.base)


class Patience:
    """How long a full ring may hold up everybody: the parent's as long as it takes, another's for a while."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # base -> when its ring was first found full

    def crowded(self, engine: Work, links: Links) -> bool:
        """Some ring has no room for the next step. One that stays full for too long is given up."""
        bound = engine.bound
        crowded = links.parent.ring.room() < bound
        for base, link in list(links.others.items()):
            if link.ring.room() >= bound:
                self._since.pop(base, None)
            elif time.monotonic() - self._since.setdefault(base, time.monotonic()) < STUCK_READER_S:
                crowded = True
            else:
                del self._since[base]
                give_up(engine, link, links)
        return crowded


def publish_all(records: Records | None, step: int, links: Links) -> None:
    """Each process gets the records of its slots, in their order; those of a process that is gone are nobody's."""
    if not links.others:
        publish(records, step, links.parent.ring, links.parent)
        return
    if records is None or not len(records):
        return
    slot = np.asarray(records.slot)
    bases = slot & ~SLOT_MASK
    for base in np.unique(bases).tolist():
        link = links.others.get(base, links.parent if not base else None)
        if link is None:
            continue
        rows = np.flatnonzero(bases == base)
        of = {name: np.asarray(getattr(records, name))[rows].tolist() for name in COLUMNS}
        logprobs = [
            msgspec.structs.replace(entry, slot=entry.slot - base)
            for entry in records.logprobs
            if entry.slot & ~SLOT_MASK == base
        ]
        try:
            publish(Records((slot[rows] - base).tolist(), **of, logprobs=logprobs), step, link.ring, link)
        except OSError:  # it has ended, or takes nothing any more
            link.hang_up()


def publish(records: Records | None, step: int, ring: RingWriter, link: Link) -> None:
    """Log probabilities, records, doorbell: in this order, so that a reader of the ring finds the first there.

    Raises OSError for another process than the parent that takes nothing. One doorbell, unless a mass of cancels does
    not fit the ring at once: the rest waits for the reader then.
    """
    if records is None:
        return
    if records.logprobs:
        link.send(wire.LogprobBatch(records.logprobs))
    done, until = 0, time.monotonic() + STUCK_READER_S
    while done < len(records):
        part = slice(done, done + ring.room())
        if part.start == part.stop:
            if link.base and time.monotonic() > until:
                raise TimeoutError
            time.sleep(FULL_RING_S)
            continue
        slot, generation, token = records.slot[part], records.generation[part], records.token[part]
        ring.write(slot, generation, token, records.index[part], records.flags[part], step)
        link.ring_bell()
        done = part.stop
