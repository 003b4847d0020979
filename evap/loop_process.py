"""One of the loop processes of `--workers N`: a server whose engine, listening sockets and accounts are shared.

`python -m evap.loop_process FD`: its end of the pipe to the parent (`processes.py`), over which the first message says
what it is. What differs from a server of one process is here, and nothing else does.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from evap import between, copies, logs
from evap.accounting import Accounting
from evap.engine.interface import Guest
from evap.engine.meter import Spec
from evap.engines import Built, build
from evap.errors import StartupError
from evap.messages import ReplicaState
from evap.metering.shared_accounts import SharedAccounts
from evap.metering.shared_operations import SharedBooks, SharedOperations
from evap.pipe import MAX_PACKET_BYTES, Pipe
from evap.protocol import listening, sockets
from evap.protocol.listening import Listener
from evap.protocol.tls import ServerTls
from evap.server import Server, runner
from evap.siblings import Siblings
from evap.tally import SIZE, Tally
from evap.turns import Turns

_encode: Final = msgspec.msgpack.Encoder().encode


class LoopProcess(Server):
    """sock: our end of the pipe."""

    def __init__(self, start: between.Start, sock: socket.socket) -> None:
        super().__init__(start.config)
        self._start, self._sock = start, sock
        self.numbers = Tally(mmap.mmap(start.tally, SIZE))
        self.late = start.late
        self._guest: Guest | None = None

    async def main(self) -> int:
        self._pipe = Pipe(
            self._sock, msgspec.msgpack.Decoder(between.ToChild), on_message=self._told, on_end=self._parent_gone
        )
        self._siblings = Siblings(
            self._start.number, self._start.count, lambda *question: self._pipe.send(between.Question(*question)),
            asyncio.get_running_loop().call_soon,
        )  # fmt: skip
        try:
            return await super().main()
        finally:
            self._pipe.close()

    # What is shared

    def _signals(self) -> None:
        """A terminal and a service manager send them to all processes; the parent acts on them, and says so."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, lambda: None)

    def _listen(self) -> list[Listener]:
        shared = [Listener(listening.take(fd)) for fd in self._start.listening]
        if self._start.tcp is None:
            return shared
        return [Listener(sockets.listen(*self._start.tcp, reuse_port=True, now=not self.late)), *shared]

    async def _build(self) -> Built:
        built = await self._loop.run_in_executor(None, build, self.config.engine, self._loop, self._want)
        self._guest = built.guest
        return built

    def _make_accounting(self, model: str) -> Accounting:
        start = self._start
        accounts = SharedAccounts(start.accounts, rows=start.rows, processes=start.count, process=start.number)
        books = SharedBooks(start.number, accounts, SharedOperations(start.operations, start.number))
        return Accounting(
            self.config.meter, model=model, slots=self.slots, now_ns=time.monotonic_ns, wall_ns=time.time_ns,
            shared=books,
        )  # fmt: skip

    def _tls(self) -> ServerTls | None:
        if self._start.certificate is not None:
            return ServerTls(self.config.server, self._start.certificate)
        return super()._tls()

    def _assemble(self, built: Built) -> None:
        super()._assemble(built)
        identity = self.dispatch.identity
        identity.secret, identity.number = self._start.secret, self._start.number  # one prefix cache of a key
        self.app.join(self._siblings, self._loop.call_later)
        self.metrics.be_one_of_several()
        start, size = self._start, Turns.size(self._start.count)
        turns = Turns(
            memoryview(mmap.mmap(start.turns, size)), process=start.number, processes=start.count, secret=start.secret,
            one_engine=self._guest is not None,
        )  # fmt: skip
        self.dispatch.room.share(turns, self._loop.call_later)

    def _announce(self, built: Built) -> None:
        if built.guest is not None:
            self.metrics.running_limit = built.replica.info.max_running
        self._pipe.send(between.Up(built.model, built.chat, built.replica.info))

    def _log_engine(self, state: ReplicaState, line: str) -> None:
        """The parent has said it, once for all."""

    # Parent and siblings

    def _want(self, meter: Spec | None) -> None:
        self._pipe.send(between.Want(meter))

    def _told(self, message: between.ToChild, fds: list[int]) -> None:
        match message:
            case between.Way(how=how, info=info) if self._guest is not None:
                self._guest.attach(how, info, fds)
            case between.Engine(state=state, line=line) if self._guest is not None:
                self._guest.engine_is(ReplicaState(state), line)
            case between.Behind(reason=reason) if self.accounting is not None:
                self.accounting.sink_behind = reason
            case between.Signal(number=signal.SIGHUP):
                self._reload()
            case between.Signal(number=number):
                self._signalled(signal.Signals(number))
            case between.Answer(id=id, data=data):
                self._siblings.answered(id, data)
            case between.Question(id=id, kind=kind, about=about):
                self._answer(kind, about, lambda data: self._pipe.send(between.Answer(id, data)))

    def _answer(self, kind: str, about: str, back: Callable[[bytes], None]) -> None:
        accounting = self.accounting
        if kind == "metrics" and hasattr(self, "metrics"):
            back(_encode(self.metrics.snapshot()))
        elif kind == "usage" and hasattr(self, "app"):
            back(self.app.usage.known(about))
        elif kind == "block" and hasattr(self, "dispatch"):
            back(copies.answer(self.dispatch.blocks, about))
        elif kind == "flush" and accounting is not None and (recorder := accounting.recorder) is not None:
            self._in_thread(self._readers, lambda: recorder.flush(1.0), lambda _: back(b"%d" % recorder.pending))
        else:
            back(b"")

    def _parent_gone(self) -> None:
        """Nobody would end us, or start the engine again: finish what can be finished, and go."""
        self._siblings.parent_gone()
        self._signalled(signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Exit status as `evap serve` has it."""
    sock = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(sock.fileno(), False)
    start = msgspec.msgpack.decode(sock.recv(MAX_PACKET_BYTES), type=between.Start)
    logs.configure(start.config.server.log_level, start.config.server.log_format)
    try:
        return runner()(LoopProcess(start, sock).main())
    except StartupError as e:
        logs.flush()
        sys.stderr.write(f"error: {e.message}\n" + (f"  try: {e.remedy}\n" if e.remedy else ""))
        return 2
    except asyncio.CancelledError:
        return 1
    finally:
        logs.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
