"""`--workers N`: the parent of several loop processes. It serves nobody itself.

It binds, starts the engine and the loop processes, hands each a channel to the engine, and starts again what dies (the
engine's replica does that for the engine). SIGTERM and SIGHUP go to all. It answers for a loop process that is asked
for what all of them know together (`questions.py`), and settles what a dead one had open (`books.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import mmap
import os
import secrets
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec

from evap import banner, between, logs, questions
from evap.books import Books, lost
from evap.child import describe_end, pause_s
from evap.config import Config
from evap.engine.interface import Hand, Host, How
from evap.engine.meter import Spec
from evap.engines import build_host
from evap.errors import StartupError
from evap.loop_child import Child
from evap.messages import EngineInfo, ReplicaState, TokenBatch
from evap.metering.record import Record
from evap.metering.shared_accounts import make_memory
from evap.protocol import listening, sockets, tls
from evap.server import EXIT_FORCED, log_engine, runner
from evap.snapshot import Snapshot, merged, of_process
from evap.tally import SIZE

logger = logging.getLogger("evap.server")
FIRST_BACKOFF_S: Final = 0.5
#: A process that lived this long starts again with the first back-off.
STEADY_S: Final = 60.0
#: Beyond the drain's time-out, for a loop process that does not end by itself.
GRACE_S: Final = 10.0
#: What a process counted for /metrics since the last look, and not in its tally, is lost when it is killed.
LOOK_S: Final = 0.5
#: Between two tries to settle what a dead process had open.
RETRY_S: Final = 1.0


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises StartupError for what the user can mend."""
    logs.configure(config.server.log_level, config.server.log_format)
    return runner()(Parent(config).main())


def shares(config: Config, count: int) -> Config:
    """What each of `count` processes is given of the limits that are the server's as a whole, rounded up."""

    def part(whole: int) -> int:
        return -(-whole // count)

    protocol, engine = config.protocol, config.engine
    protocol = dataclasses.replace(
        protocol, max_connections=part(protocol.max_connections), max_open_streams=part(protocol.max_open_streams),
        max_connections_per_address=part(protocol.max_connections_per_address),
        max_buffered_header_bytes=max(1 << 16, part(protocol.max_buffered_header_bytes)),
        max_buffered_body_bytes=max(part(protocol.max_buffered_body_bytes), protocol.max_body_bytes),
        push_memory_bytes=part(protocol.push_memory_bytes),
    )  # fmt: skip
    engine = dataclasses.replace(
        engine, max_queued_requests=part(engine.max_queued_requests), max_queued_tokens=part(engine.max_queued_tokens)
    )  # fmt: skip
    if engine.engine == "synthetic":  # each has one of its own
        engine = dataclasses.replace(engine, max_running=part(engine.max_running))
    return dataclasses.replace(config, protocol=protocol, engine=engine)


class Parent:
    """The process that `evap serve --workers N` is."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.count = config.server.workers
        self._started_ns = time.monotonic_ns()
        self.books = Books(config.meter, self.count, now_ns=time.monotonic_ns, wall_ns=time.time_ns)
        self.children: dict[int, Child] = {}
        self.questions = questions.Questions(self.children, self._own)
        self._failures = [0] * self.count
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted: dict[int, Spec | None] = {}  # children that want a way to the engine, and their pages
        self._announced = False
        self._stopping = False
        self._code = 0
        self._news = asyncio.Event()  # something happened that `main` may wait for
        self._error: StartupError | None = None
        self._engine: Host | None = None
        self._place: socket.socket | None = None

    async def main(self) -> int:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._to_all, signal.SIGHUP)
        self._listen()
        try:
            await self._loop.run_in_executor(None, self.books.open)
            self._certificate = self._make_certificate()
            self._engine = await self._loop.run_in_executor(None, build_host, self.config.engine, self.count)
            return await self._serve()
        finally:
            await self._end()

    def _listen(self) -> None:
        """A TCP port of our own is bound here and listened on by each child; other sockets are shared as they are."""
        server, passed = self.config.server, listening.passed(os.environ, os.getpid())
        self.listeners: list[listening.Listener] = []
        if not passed and server.host != listening.NO_TCP:
            self._place = sockets.reserve(server.host, server.port)
        if passed or server.uds or self._place is None:
            self.listeners = listening.open_all(dataclasses.replace(server, host=listening.NO_TCP), passed)

    def _make_certificate(self) -> tuple[bytes, bytes] | None:
        server = self.config.server
        if server.tls == "self-signed":
            return tls.self_signed(server.host)
        if server.tls_cert or server.tls_key:
            tls.ServerTls(server)  # so that what is wrong with it is said once
        return None

    async def _serve(self) -> int:
        secret = secrets.token_bytes(32)
        place = self._place.getsockname()[:2] if self._place is not None else None
        shared = [listener.sock.fileno() for listener in self.listeners]
        self._start = between.Start(
            0, self.count, shares(self.config, self.count), place, shared, self.books.accounts_fd, self.books.rows,
            self.books.operations_fd, self.books.turns_fd, secret, self._certificate,
        )  # fmt: skip
        for number in range(self.count):
            self._spawn(number)
        if self._engine is not None:
            self._engine.listen(_ignore, self._engine_state)
            self._task(self._run_engine(self._engine))
        await self._until(lambda: self._stopping or all(self._up(n) for n in range(self.count)))
        if not self._stopping:
            self._announce()
            self._announced = True
        self._task(self._look())
        await self._until(lambda: self._stopping and not self.children)
        return self._code

    def _up(self, number: int) -> bool:
        return number in self.children and self.children[number].up is not None

    async def _until(self, happened: Callable[[], bool]) -> None:
        """Raises the StartupError of whoever found one."""
        while not happened():
            self._news.clear()
            await self._news.wait()
            if self._error is not None:
                raise self._error

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The engine

    async def _run_engine(self, engine: Host) -> None:
        try:
            await engine.start()
        except StartupError as error:
            if not self._stopping:
                self._error = error
            self._news.set()

    def _engine_state(self, state: ReplicaState, line: str) -> None:
        log_engine(state, line)
        if state is ReplicaState.READY:
            self._hand_out()
        for child in self.children.values():
            child.pipe.send(between.Engine(state.value, line))

    def _hand_out(self) -> None:
        """A way to the engine for each child that wants one."""
        engine = self._engine
        if engine is None or engine.state is not ReplicaState.READY:
            return
        linger_s = self.config.server.drain_timeout_s + GRACE_S
        for number in [n for n in self._wanted if n in self.children]:
            engine.lead(number, self._wanted.pop(number), self._hand(self.children[number]), linger_s)

    def _hand(self, child: Child) -> Hand:
        def hand(how: How, info: EngineInfo, fds: Sequence[int]) -> None:
            child.pipe.send(between.Way(how, info), fds)  # it may have ended meanwhile: nobody reads it then

        return hand

    # Loop processes

    def _spawn(self, number: int) -> None:
        start, listeners = self._start, [listener.sock.fileno() for listener in self.listeners]
        tally = make_memory("evap-tally", SIZE)
        mine = msgspec.structs.replace(start, number=number, tally=tally, late=self._announced)
        fds = [*listeners, *self.books.inherited, tally]
        child = self.children[number] = Child(mine, fds, on_message=self._told, on_exit=self._exited)
        child.tally = mmap.mmap(tally, SIZE)
        os.close(tally)

    def _told(self, child: Child, message: between.FromChild) -> None:
        match message:
            case between.Up():
                child.up = message
                self._news.set()
            case between.Want(meter=meter):
                again = child.number in self._wanted
                self._wanted[child.number] = meter
                if not again:  # not at once: it may be the engine that is about to be known dead
                    self._loop.call_later(0.05, self._hand_out)
            case between.Answer():
                self.questions.answered(child, message)
            case between.Question(id=id, kind=kind, about=about, of=of):
                back = lambda data: child.pipe.send(between.Answer(id, data))  # noqa: E731
                self.questions.ask(kind, about, back, asker=child.number, of=of)

    def _exited(self, child: Child, status: int) -> None:
        number = child.number
        self._wanted.pop(number, None)
        if self._engine is not None:
            self._engine.gone(number)
        if child.up is None and not self._announced and not self._stopping:  # later the others go on serving
            self._error = StartupError(f"a loop process did not start ({describe_end(status)}): its reason is above")
        child.up = None
        if self._stopping and status == EXIT_FORCED:
            self._code = EXIT_FORCED
        if not self._stopping or status != 0:
            logger.error("loop process %d ended: %s", number, describe_end(status))
        self._task(self._bury(child))

    async def _bury(self, child: Child) -> None:
        """Settle what it had open; then another takes its place, or all is over."""
        interrupted: list[Record] = []
        while True:
            try:
                interrupted = await self._loop.run_in_executor(None, self.books.bury, child.number)
                break
            except (OSError, sqlite3.Error) as error:
                logger.error("what loop process %d had open cannot be settled yet: %s", child.number, error)
                if self._stopping:
                    break  # the next start does it
                await asyncio.sleep(RETRY_S)
        self.questions.gone(child, lost(interrupted))
        self._news.set()
        if self._stopping or self._error is not None:
            return
        lived = self._loop.time() - child.started_s
        failures = self._failures[child.number] = 0 if lived > STEADY_S else self._failures[child.number] + 1
        pause = pause_s(max(0, failures - 1), FIRST_BACKOFF_S)
        logger.info("loop process %d starts again in %g s", child.number, pause)
        await asyncio.sleep(pause)
        if not self._stopping:
            self._spawn(child.number)

    async def _look(self) -> None:
        """From time to time: what each has counted, in case it is killed; and how our sink is, for their `/ready`."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.questions.ask("metrics", "", lambda _: None)
            if self.books.sink is not None:  # also to those that have come since
                for child in self.children.values():
                    child.pipe.send(between.Behind(self.books.sink.error))

    def _own(self, page: bool) -> Snapshot:
        children = list(self.children.values())
        pids = {"parent": os.getpid()} | {str(child.number): child.pid for child in children}
        if self._engine is not None and (engine := self._engine.pid) is not None:
            pids["engine"] = engine
        system = [of_process(name, pid) for name, pid in pids.items() if page]
        restarts = Snapshot({"evap_engine_restarts": {"": float(getattr(self._engine, "restarts", 0))}}, {}, {})
        return merged([self.books.snapshot(), questions.numbers(children), restarts, *system])

    # Life and end

    def _announce(self) -> None:
        up = self.children[0].up
        assert up is not None
        host, port, unix = listening.addresses(self.listeners)
        if self._place is not None:
            host, port = self._place.getsockname()[:2]
        banner.announce(
            self.config, (host, port, unix), up.info, model=up.model, chat=up.chat,
            started_s=(time.monotonic_ns() - self._started_ns) / 1e9, workers=self.count,
        )  # fmt: skip

    def _to_all(self, number: signal.Signals) -> None:
        for child in self.children.values():
            child.tell(number)

    def _kill_all(self) -> None:
        for child in self.children.values():
            child.kill()

    def _signalled(self, number: signal.Signals) -> None:
        first, self._stopping = not self._stopping, True
        if first:
            self._loop.call_later(self.config.server.drain_timeout_s + GRACE_S, self._kill_all)
        self._to_all(signal.SIGTERM)  # a second one ends them at once
        self._news.set()

    async def _end(self) -> None:
        self._stopping = True
        self._kill_all()  # those that are left after an error: nobody is served any more
        while self.children:
            self._news.clear()
            await self._news.wait()
        for task in list(self._tasks):
            task.cancel()
        if self._engine is not None:
            with contextlib.suppress(StartupError):
                await self._engine.stop()
        listening.close_all(self.listeners)
        if self._place is not None:
            self._place.close()
        await self._loop.run_in_executor(None, self.books.close)


def _ignore(batch: TokenBatch) -> None:
    """The parent asks the engine for nothing."""
