"""Builds everything, listens, drains. The only file that names all concrete classes and owns the loop.

Order of a start: bind the port (a taken one is said at once, not after minutes of loading), start the engine (`/ready`
is 503 meanwhile, `/health` 200), print the banner. Order of an end: refuse what is new, let running answers finish,
at the deadline end them with an error event, then the connections, then the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from evap import banner, dispatch, logs, metrics, tracing
from evap.accounting import Accounting
from evap.app import App, send_error
from evap.coalesce import Coalescer
from evap.config import Config, EngineConfig
from evap.dispatch import Dispatch, Shell
from evap.engines import Built, build
from evap.errors import Draining
from evap.heartbeat import Heartbeat
from evap.intake.helper import Intake
from evap.intake.wire import Boot
from evap.messages import ReplicaState
from evap.metrics import Metrics
from evap.observe import Observer, watch
from evap.protocol import limits, listening
from evap.protocol.listening import Listener
from evap.protocol.rows import RowTable
from evap.protocol.tls import ServerTls
from evap.protocol.transport import Hub
from evap.tally import Numbers, Plain
from evap.waiting import AHEAD

logger = logging.getLogger("evap.server")
#: threads that tokenize large prompts
POOL_THREADS: Final = 2
EXIT_FORCED: Final = 1
#: An exchange makes some hundred objects and few cycles; the default of 700 would collect every few requests.
GC_THRESHOLDS: Final = (20_000, 50, 100)


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises StartupError for what the user can mend."""
    logs.configure(config.server.log_level, config.server.log_format)
    return runner()(Server(config).main())


def runner() -> Callable[..., int]:
    try:
        import uvloop  # noqa: PLC0415 - absent on platforms that it does not support
    except ImportError:
        return asyncio.run
    return uvloop.run


class Server:
    """One process: one loop, one engine, all connections."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.slots = _slots(config.engine)
        self._started_ns = time.monotonic_ns()
        self.late = False  #: accept connections only once the engine is ready
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="evap-tokenize")
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="evap-usage")
        self.numbers: Numbers = Plain()
        self.accounting: Accounting | None = None
        self.tls: ServerTls | None = None
        self.tracer = tracing.start(config.server.otel_endpoint) if config.server.otel_endpoint else None
        self.heartbeat = Heartbeat(int(config.meter.hang_timeout_s * 1e9))

    async def main(self) -> int:
        """The whole life of the process."""
        self._loop = asyncio.get_running_loop()
        self._signals()
        self.listeners = self._listen()
        try:
            built = await self._build()
            self.accounting = accounting = self._make_accounting(built.model)
            await self._loop.run_in_executor(None, accounting.open)
            if built.replica.engines:
                built.replica.meters = accounting.meter(
                    built.replica.engines, ahead=built.replica.runs_ahead, gpu=self.config.engine.device != "cpu"
                )
            try:
                return await self._serve(built)
            finally:
                await self._loop.run_in_executor(None, accounting.close)
                if self.tracer is not None:
                    await self._loop.run_in_executor(None, self.tracer.close)
        finally:
            listening.close_all(self.listeners)
            for pool in (self._pool, self._readers):
                pool.shutdown(wait=False, cancel_futures=True)

    def _signals(self) -> None:
        for name in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(name, self._signalled, name)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _listen(self) -> list[Listener]:
        return listening.open_all(self.config.server, listening.passed(os.environ, os.getpid()))

    def _make_accounting(self, model: str) -> Accounting:
        return Accounting(
            self.config.meter, model=model, slots=self.slots, now_ns=time.monotonic_ns, wall_ns=time.time_ns
        )

    def _reload(self) -> None:
        """SIGHUP: the key file and the certificate are read again; nothing running notices."""
        if self.accounting is not None:
            self.accounting.reload()
        if self.tls is not None:
            self.tls.reload()

    async def _build(self) -> Built:
        if self.config.engine.engine == "synthetic":
            return build(self.config.engine, self._loop)
        return await self._loop.run_in_executor(None, build, self.config.engine, self._loop)

    async def _serve(self, built: Built) -> int:
        self.tls = self._tls()
        tls = self.tls.context if self.tls is not None else None
        self._assemble(built)
        servers = [] if self.late else await self._accept_all(tls)
        tickers = [self._loop.create_task(work()) for work in (self._tick, self._watch)]
        try:
            if not await self._start_engine(built):
                return 0
            servers = servers or await self._accept_all(tls)
            self._announce(built)
            gc.collect()
            gc.freeze()  # what is alive now stays alive: collections need not walk it
            gc.set_threshold(*GC_THRESHOLDS)
            await self._stop.wait()
            return await self._drain()
        finally:
            for ticker in tickers:
                ticker.cancel()
            for server in servers:
                server.close()
            self.hub.close()
            if self.intake is not None:
                self.intake.close()
            await built.replica.stop()

    async def _accept_all(self, tls: ssl.SSLContext | None) -> list[asyncio.AbstractServer]:
        return [await self._accept(listener, tls) for listener in self.listeners]

    async def _accept(self, listener: Listener, tls: ssl.SSLContext | None) -> asyncio.AbstractServer:
        """A UNIX socket has no TLS: its file's permissions say who may connect, and nobody listens in between."""
        loop, backlog = self._loop, listening.BACKLOG
        if not listener.unix:
            return await loop.create_server(self.hub.protocol, sock=listener.sock, ssl=tls, backlog=backlog)
        stock = isinstance(loop, asyncio.BaseEventLoop) and sys.version_info >= (3, 13)
        keep: dict[str, Any] = (
            {"cleanup_socket": False} if stock else {}
        )  # removing the file is not the loop's business
        return await loop.create_unix_server(self.hub.protocol, sock=listener.sock, backlog=backlog, **keep)

    def _assemble(self, built: Built) -> None:
        config = self.config
        numbers = self.numbers
        self.metrics = Metrics(built.model, self.slots, numbers)
        observer = Observer(
            self.metrics, model=built.model, now_ns=time.monotonic_ns, wall_s=time.time,
            log_requests=config.server.log_requests, tracer=self.tracer,
        )  # fmt: skip
        self.rows = RowTable(self.slots)
        self.intake = self._intake(built)
        self.dispatch = Dispatch(
            config, text=built.text, replica=built.replica, rows=self.rows, model=built.model,
            shell=Shell(
                now_ns=time.monotonic_ns, wall_s=time.time, in_pool=self._in_pool, soon=self._loop.call_soon,
                later=self._loop.call_later,
                flush=self._flush, settled=observer.settled, log_exception=logger.exception, send_error=send_error,
            ),
            accounting=self.accounting, live=self.metrics.live, intake=self.intake,
            limits=numbers.counts(metrics.LIMITS[0], dispatch.LIMITS),
        )  # fmt: skip
        self.app = App(
            config, self.dispatch, self.metrics, created_s=int(time.time()), hung=self._hung,
            structured_output=built.engine == "vllm",
            background=lambda work, back: self._in_thread(self._readers, work, back),
        )  # fmt: skip
        self.hub = Hub(config.protocol, on_event=self.app.on_event, loop=self._loop)
        shared = self.hub.shared
        shared.admit, shared.answered = self.app.admit, self.metrics.answered
        shared.limits = numbers.counts(metrics.LIMITS[1], limits.LIMITS)
        shared.counts = numbers.counts(metrics.WIRE, limits.COUNTS)
        if self.intake is not None:
            shared.spool_over = config.protocol.large_body_bytes
        on_batch = self.dispatch.steps.on_batch
        if config.protocol.coalesce_ms:
            on_batch = Coalescer(config.protocol.coalesce_ms / 1e3, on_batch, self._loop.call_later).on_batch
        built.replica.listen(on_batch, self._engine_state)
        watch(self.metrics, self.dispatch, shared, config.engine, self.tracer)
        self.metrics.gauge("tasks", "Tasks of the loop", lambda: float(len(asyncio.all_tasks(self._loop))))

    def _intake(self, built: Built) -> Intake | None:
        """Where large bodies go; None where the system has no memory files (they are Linux'), or by option."""
        engine = self.config.engine
        if not self.config.protocol.large_body_bytes or not hasattr(os, "memfd_create"):
            return None
        structured = built.engine == "vllm"
        boot = Boot(built.path, engine.token_cache_mb, engine.max_choices, structured)
        return Intake(boot, self.config.protocol.large_body_queue)

    # What dispatch asks of the loop

    def _in_pool(self, work: Callable[[], Any], back: Callable[[Any], None]) -> None:
        self._in_thread(self._pool, work, back)

    def _in_thread(self, pool: ThreadPoolExecutor, work: Callable[[], Any], back: Callable[[Any], None]) -> None:
        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - handed back to the loop, which judges it
                result = error
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(back, result)

        pool.submit(run)

    def _flush(self) -> None:
        self.hub.flush()

    # Start

    def _tls(self) -> ServerTls | None:
        server = self.config.server
        if not (server.tls or server.tls_cert or server.tls_key):
            return None
        return ServerTls(server)

    async def _start_engine(self, built: Built) -> bool:
        """True once it is ready; False when a signal came first."""
        starting = self._loop.create_task(built.replica.start())
        stopping = self._loop.create_task(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return False
        stopping.cancel()
        starting.result()
        return True

    def _engine_state(self, state: ReplicaState, line: str) -> None:
        if state is ReplicaState.READY:
            self.dispatch.engine_ready()
        if state is ReplicaState.FAILED:
            self.dispatch.engine_lost()
        self.app.detail = line
        self._log_engine(state, line)

    def _log_engine(self, state: ReplicaState, line: str) -> None:
        log_engine(state, line)

    def _announce(self, built: Built) -> None:
        banner.announce(
            self.config, listening.addresses(self.listeners), built.replica.info, model=built.model,
            chat=built.chat, started_s=(time.monotonic_ns() - self._started_ns) / 1e9,
        )  # fmt: skip

    # Life and end

    async def _tick(self) -> None:
        """Comments for silent streams; deadlines of connections are the hub's."""
        period = self.config.protocol.keepalive_comment_s
        while True:
            await asyncio.sleep(period or 60.0)
            if period:
                self.dispatch.upkeep.tick()

    async def _watch(self) -> None:
        """A working engine without progress hangs; slow readers' accounts are kept up to date."""
        while True:
            await asyncio.sleep(min(1.0, self.heartbeat.timeout_ns / 4e9) if self.heartbeat.timeout_ns else 1.0)
            dispatch, now_ns = self.dispatch, time.monotonic_ns()
            working = dispatch.steps.slots.free < dispatch.steps.slots.size
            progress = dispatch.steps.batches + (dispatch.accounting.pages.progress if dispatch.accounting.pages else 0)
            progress += getattr(dispatch.replica, "beats", 0)
            if self.heartbeat.look(progress, working=working, now_ns=now_ns):
                logger.error("%s", self._hung() or "the engine moves again")
            if dispatch.accounting.energy is not None:
                for exchange in dispatch.open:
                    dispatch.steps.counts(exchange)
            dispatch.accounting.tick(list(dispatch.open))
            dispatch.upkeep.overdue()
            dispatch.blocks.sweep()

    def _hung(self) -> str:
        return self.heartbeat.trouble(time.monotonic_ns(), getattr(self.dispatch.replica, "step_since_ns", None))

    def _signalled(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            logger.warning("%s again: ending at once", number.name)
            self._forced.set()
        self._stop.set()

    async def _drain(self) -> int:
        """Finish what runs, refuse what is new; 0, or EXIT_FORCED after a second signal."""
        timeout = self.config.server.drain_timeout_s
        logger.info("draining: %d open exchanges, at most %g s", len(self.dispatch.open), timeout)
        self.dispatch.draining = True
        self.hub.drain()
        if self.dispatch.large is not None:
            self.dispatch.large.drain()
        deadline = self._loop.time() + timeout
        while self.dispatch.active and not self._forced.is_set() and self._loop.time() < deadline:
            await self._wait(0.02)
        forced = self._forced.is_set()
        if self.dispatch.active:
            self.dispatch.fail_all(Draining("the server shut down before this answer was complete"))
        until = self._loop.time() + (0.0 if forced else 2.0)  # for what was written to leave
        while (self.hub.unsent or self.dispatch.ending) and self._loop.time() < until:
            await self._wait(0.02)
        return EXIT_FORCED if forced else 0

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._forced.wait(), seconds)


def log_engine(state: ReplicaState, line: str) -> None:
    if state is ReplicaState.FAILED:
        logger.error("engine: %s", line)
    elif line:
        logger.info("engine: %s", line)


def _slots(engine: EngineConfig) -> int:
    """Enough for all that the engine may be given at once (see `waiting.py`), with one request of many choices."""
    runs = max(engine.max_running, engine.max_num_seqs) * engine.replicas
    return min(1 << 16, runs + runs // AHEAD + 1 + engine.max_choices)
