"""The shell around the wire cores: asyncio transports, the clock, and which HTTP a connection speaks.

Rules:
1. One write per connection and loop pass, or per engine step (`Hub.flush`); a core's output is joined, never written
   piecewise: a system call costs more than the copy.
2. While the transport holds more than it should, nothing is read either: a peer that does not read cannot make us work.
3. One timer per process; a connection without a due deadline costs it an attribute look-up.
4. Input is handled some frames at a time; in between others have their turn, and the connection is not read from.
5. EOF from the peer is taken as "gone" by both cores (see their `eof`).
6. No exception leaves a callback: a bug in a core or a handler costs its connection, is logged, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from evap.config import ProtocolConfig
from evap.protocol import sockets
from evap.protocol.connection import Http2Core
from evap.protocol.events import Event
from evap.protocol.gate import PREFACE
from evap.protocol.http1 import Http1Core
from evap.protocol.limits import NEVER, NS, Shared, tick_period_s, to_ns
from evap.protocol.sockets import Why

logger = logging.getLogger("evap.protocol")

#: Flushes in a row before other connections get their turn.
MAX_ROUNDS: Final = 4
DRAIN_PERIOD_S: Final = 0.1  # the timer's, while draining


class Hub:
    """All connections of a process. `protocol` is the factory for `loop.create_server`."""

    def __init__(
        self, config: ProtocolConfig, *, on_event: Callable[[Event], None], loop: asyncio.AbstractEventLoop,
        shared: Shared | None = None, clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:  # fmt: skip
        self.config = config
        self.on_event = on_event
        self.loop = loop
        self.shared = shared if shared is not None else Shared()
        self.clock = clock
        self.live: set[ServerProtocol] = set()
        self.dirty: list[ServerProtocol] = []
        self._period_s = tick_period_s(config)
        self._flushing: asyncio.Handle | None = None
        self._timer: asyncio.Handle | None = None
        self._tick()

    def protocol(self) -> ServerProtocol:
        return ServerProtocol(self)

    def flush(self) -> None:
        """Write what replies have produced since the last flush: once per connection. At the end of an engine step."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        dirty, self.dirty = self.dirty, []
        for protocol in dirty:
            protocol.turn()

    def mark(self, protocol: ServerProtocol) -> None:
        """`protocol` has output; it is flushed at the end of this loop pass unless somebody flushes before."""
        self.dirty.append(protocol)
        if self._flushing is None:
            self._flushing = self.loop.call_soon(self._soon)

    def drain(self) -> None:
        """Refuse new requests and connections; each connection closes when its last answer is done."""
        self.shared.draining = True
        self._period_s = min(self._period_s, DRAIN_PERIOD_S)
        for protocol in list(self.live):
            protocol.drain()
        if self._timer is not None:
            self._timer.cancel()
            self._tick()

    def stop(self) -> None:
        """The end of the drain: answers that still run are cancelled ("drain"), connections close."""
        for protocol in list(self.live):
            protocol.stop()

    def close(self) -> None:
        """Stop the timer and drop every connection."""
        self.stop()
        for protocol in list(self.live):
            protocol.abort()
        for handle in (self._timer, self._flushing):
            if handle is not None:
                handle.cancel()
        self._timer = self._flushing = None

    @property
    def unsent(self) -> int:
        """Bytes that transports still hold, and one for each connection that has not said goodbye yet."""
        return sum(protocol.queued + (not protocol.said_bye) for protocol in self.live)

    def _soon(self) -> None:
        self._flushing = None
        self.flush()

    def _tick(self) -> None:
        self._timer = self.loop.call_later(self._period_s, self._tick)
        now_ns = self.clock()
        self.shared.wall_offset_ns = time.time_ns() - now_ns
        for protocol in list(self.live):
            if protocol.due_ns <= now_ns:
                protocol.tick(now_ns)


class ServerProtocol(asyncio.Protocol):
    """One connection: finds out which HTTP it is, then moves bytes and events between transport and core."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._core: Http2Core | Http1Core | None = None
        self._transport: asyncio.Transport | None = None
        self._peer, self._tls = "", False
        self._fd = -1  # of a plain TCP connection
        self._sniffed = b""
        self._marked = False
        self.said_bye = self._gone = (
            False  # after a bye nothing is written, and input thrown away until the peer closes
        )
        self._reading = sockets.Reading()
        self.due_ns = NEVER

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = stream = cast("asyncio.Transport", transport)
        hub, shared = self._hub, self._hub.shared
        hub.live.add(self)
        stream.set_write_buffer_limits(high=hub.config.write_buffer_bytes // 2, low=hub.config.write_buffer_bytes // 4)
        sock = stream.get_extra_info("socket")
        sockets.no_delay(sock)
        self._peer = sockets.address(stream.get_extra_info("peername"))
        tls = stream.get_extra_info("ssl_object")
        self._fd = sock.fileno() if tls is None and sock is not None else -1
        self._tls = tls is not None
        self.due_ns = hub.clock() + to_ns(hub.config.preface_timeout_s)
        if not shared.arrived(self._peer, hub.config) or shared.draining:
            self._turn_away(tls)
        elif tls is not None:
            self._start(Http2Core if tls.selected_alpn_protocol() == "h2" else Http1Core)
            self.flush()

    def data_received(self, data: bytes) -> None:
        if self.said_bye or self._gone:
            return
        core = self._core
        if core is None:
            data = self._sniffed + data
            size = min(len(data), len(PREFACE))
            if data[:size] != PREFACE[:size]:
                core = self._start(Http1Core)
            elif size == len(PREFACE):
                core = self._start(Http2Core)
            else:
                self._sniffed = data
                return
            self._sniffed = b""
        self._run(core.receive, data)

    def eof_received(self) -> bool:
        """False: asyncio closes the transport, after what is queued has been written."""
        self._lost()
        if self._core is not None and self._transport is not None and not self.said_bye:
            self._transport.write(b"".join(self._core.take_output()))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()
        self._transport, self._fd = None, -1
        if self._core is not None:
            self._core.release()
        self._hub.shared.left(self._peer)
        self._hub.live.discard(self)

    def pause_writing(self) -> None:
        """Rule 2. HTTP/1.1 bounds its input itself, and must go on reading to notice a client that leaves."""
        if not self.said_bye and isinstance(self._core, Http2Core):
            self._reading.pause(self._transport, Why.STUFFED)

    def resume_writing(self) -> None:
        self._reading.resume(self._transport, Why.STUFFED)
        self.flush()

    # --- what the hub calls ---

    @property
    def queued(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def turn(self) -> None:
        """Input that was left over, then output."""
        core = self._core
        if core is not None and core.unread and not self.said_bye and not self._gone:
            self._run(core.receive, b"")
        else:
            self.flush()

    def flush(self) -> None:
        """Write all that may be written now, and hand over the events that this makes."""
        self._marked = False
        core, transport = self._core, self._transport
        if core is None or transport is None or self.said_bye:
            return
        try:
            for _ in range(MAX_ROUNDS):
                out = core.take_output()
                queued = sockets.write(transport, self._fd, out) if out else transport.get_write_buffer_size()
                events = core.written(queued, self._hub.clock())
                if events:
                    self._dispatch(events)
                elif not core.more:
                    break
            else:
                self._wake()
            self._after()
        except Exception:  # noqa: BLE001 - rule 6
            self._bug()

    def tick(self, now_ns: int) -> None:
        transport, core = self._transport, self._core
        if transport is None:
            return
        if self.said_bye or core is None:
            self._hub.shared.limits["preface_timeout"] += not self.said_bye
            transport.abort()
        else:
            self._run(core.tick)

    def drain(self) -> None:
        core = self._core
        if core is None:
            return self._close()
        core.drain(self._hub.clock())
        self.flush()

    def stop(self) -> None:
        if self._core is not None:
            self._run(self._core.stop)
        self._close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- inside ---

    def _start(self, kind: type[Http2Core] | type[Http1Core]) -> Http2Core | Http1Core:
        hub = self._hub
        core = kind(hub.config, peer=self._peer, tls=self._tls, shared=hub.shared, now_ns=hub.clock())
        if kind is Http1Core and self._transport is not None:
            # One response at a time: the next waits until this one has left, so "queued" has to be exact. (Over TLS a
            # limit of 0 would be reached by an empty buffer.)
            self._transport.set_write_buffer_limits(high=1 if self._tls else 0, low=0)
        core.wake = self._wake
        if self._fd >= 0:
            core.direct = self._direct
        self._core = core
        return core

    def _direct(self, data: bytes | memoryview) -> int:
        transport = self._transport
        if transport is None or self.said_bye:  # nobody is there any more
            return 0
        return sockets.write_one(transport, self._fd, data)

    def _wake(self) -> None:
        if not self._marked:
            self._marked = True
            self._hub.mark(self)

    def _run(self, call: Callable[..., list[Event]], *args: Any) -> None:
        """One call of the core with the time, its events, and what it has to write."""
        self._marked = True  # the flush below writes what the handlers of these events answer
        try:
            events = call(*args, self._hub.clock())
        except Exception:  # noqa: BLE001 - rule 6
            return self._bug()
        self._dispatch(events)
        self.flush()

    def _dispatch(self, events: Sequence[Event]) -> None:
        """Every event, also after one that its handler failed on."""
        for event in events:
            try:
                self._hub.on_event(event)
            except Exception:  # noqa: BLE001 - rule 6
                self._bug()

    def _after(self) -> None:
        """After a flush: the next deadline, or the end."""
        core, transport = self._core, self._transport
        if getattr(core, "aborting", False):
            self.abort()
        elif core is not None and core.closing:
            self._close()
        else:
            self.due_ns = getattr(core, "deadline_ns", 0)
            if core is not None and core.unread:  # rule 4
                self._reading.pause(transport, Why.BEHIND)
                self._wake()
            elif self._reading.why:
                self._reading.resume(transport, Why.BEHIND)

    def _close(self) -> None:
        """Say that nothing more comes, and read on: else the kernel would answer what is still coming with a TCP reset,
        which could take our last words away from the client (RFC 9112 9.6)."""
        transport = self._transport
        if transport is None or self.said_bye:
            return
        self.said_bye = True
        self.due_ns = self._hub.clock() + to_ns(self._hub.config.linger_s)
        if self.queued:
            self.due_ns += int(self._hub.config.stall_timeout_s * NS)
        if transport.can_write_eof() and not self._gone:
            with contextlib.suppress(OSError):
                transport.write_eof()
            transport.resume_reading()
        else:
            transport.close()

    def _lost(self) -> None:
        if self._gone:
            return
        self._gone = True
        core = self._core
        if core is not None:
            self._dispatch(core.eof(self._hub.clock()))

    def _turn_away(self, tls: object) -> None:
        """Too many, or on the way out. Who speaks HTTP/2 sees a closed connection, and tries again."""
        if tls is None and self._transport is not None:
            self._transport.write(sockets.TURNED_AWAY)
        self._close()

    def _bug(self) -> None:
        """Rule 6. The peer is told nothing but the end."""
        logger.exception("connection of %s ended by an error of ours", self._peer)
        self.abort()
