"""The server's end of the intake process: started when the first large body arrives, fed one job at a time.

Rule 1: everything runs on the loop's thread and nothing waits. What is queued is queued here, never in the process.
Rule 2: a job's `done` is called once per step (parsed, then encoded) or with an error, and never after `cancel`.
Rule 3: if the process dies, the job at hand has failed; those behind it go to the next process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from evap.errors import InternalError, Overloaded
from evap.intake import wire
from evap.messages import ParsedRequest, Prompt
from evap.pipe import PipedChild
from evap.protocol.spool import Spool

logger = logging.getLogger("evap.intake")
#: Overloaded.code where no more jobs may wait
QUEUE_FULL: Final = "large_queue_full"
#: A prompt of fewer ids becomes a list, as prompts of small bodies are; a longer one stays where it is.
LIST_IDS: Final = 4096
#: Behind the loop and the engine: whoever sends megabytes can wait a little longer than who waits for the next token.
NICENESS: Final = 5


class Job:
    """A large request, from its whole body to its token ids."""

    __slots__ = ("dialect", "done", "id", "spool")

    def __init__(self, spool: Spool, dialect: str, done: Callable[[ParsedRequest | Exception], None]) -> None:
        self.id = 0
        self.spool = spool
        self.dialect = dialect
        #: of the present step: takes a ParsedRequest, then a Prompt, or an exception instead
        self.done: Callable[..., None] = done


class Intake:
    """The process, or none, and who waits for it: `most` jobs, whose bodies count for --max-buffered-body-bytes."""

    def __init__(self, boot: wire.Boot, most: int = 64, *, module: str = "evap.intake.worker") -> None:
        self._boot = boot
        self._most = most
        self._module = module
        self._waiting: deque[Job] = deque()
        self._current: Job | None = None
        self._process: _Process | None = None
        self._count = 0

    @property
    def jobs(self) -> int:
        return len(self._waiting) + (self._current is not None)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def parse(self, spool: Spool, dialect: str, done: Callable[[ParsedRequest | Exception], None]) -> Job:
        """`done` gets the request without its prompt, or an error. Raises Overloaded."""
        if len(self._waiting) >= self._most:
            text = f"{self._most} large requests are waiting; try again later"
            raise Overloaded(text, code=QUEUE_FULL, retry_after_s=1)
        job = Job(spool, dialect, done)
        self._waiting.append(job)
        self._next()
        return job

    def encode(self, job: Job, limit_tokens: int, done: Callable[[Prompt | Exception], None]) -> None:
        """The parsed job has been admitted: `done` gets its Prompt, or an error."""
        job.done = done
        if job is not self._current or self._process is None:
            done(_died())
        else:
            self._process.send(wire.Encode(job.id, limit_tokens))

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: its memory is free now, and the process is at the next job soon."""
        job.spool.close()
        if job is self._current:
            if self._process is not None:
                self._process.send(wire.Cancel(job.id))
            self._current = None
            self._next()
        elif job in self._waiting:
            self._waiting.remove(job)

    def hangs(self, job: Job) -> None:
        """Nobody waits for it any more, for far too much time has passed. If it is at hand, the process is beyond help;
        those behind it go to the next one."""
        if job is not self._current or self._process is None:
            self.cancel(job)
            return
        logger.error("the intake process is ended: it has not answered in time")
        job.done = _ignored
        self._process.kill()

    def close(self) -> None:
        """End the process. Jobs are dropped."""
        self._waiting.clear()
        self._current = None
        if self._process is not None:
            self._process.end()

    def _next(self) -> None:
        if self._current is not None or not self._waiting:
            return
        self._current = job = self._waiting.popleft()
        self._count += 1
        job.id = self._count
        if self._process is None:
            try:
                self._process = _Process(self._module, on_message=self._received, on_exit=self._exited)
            except OSError:
                logger.exception("the intake process cannot be started")
                asyncio.get_running_loop().call_soon(self._fail, job)  # not within `parse`
                return
            self._process.send(self._boot)
        self._process.send(wire.Parse(job.id, job.dialect), [job.spool.fd])

    def _received(self, message: wire.FromWorker) -> None:
        job = self._current
        if isinstance(message, wire.Ready) or job is None or message.job != job.id:
            return
        match message:
            case wire.Parsed(size=size):
                job.spool.free()
                done, job.done = job.done, _ignored
                done(wire.request.decode(os.pread(job.spool.fd, size, 0)))
            case wire.Encoded():
                self._finish(job, _prompt(message, job.spool.fd))
            case wire.Refused():
                self._finish(job, wire.error(message))
            case wire.Failed(trace=trace):
                logger.error("a large request could not be prepared\n%s", trace)
                self._finish(job, InternalError("the request could not be prepared"))

    def _finish(self, job: Job, result: Prompt | Exception) -> None:
        self._current = None
        job.spool.close()
        self._next()
        job.done(result)

    def _exited(self, status: int) -> None:
        self._process = None
        if self._current is not None:
            logger.error("the intake process ended with status %d while it prepared a request", status)
            self._fail(self._current)

    def _fail(self, job: Job) -> None:
        if job is self._current:
            self._finish(job, _died())


def _ignored(result: object) -> None:
    """Between the steps of a job there is nobody to tell."""


def _died() -> InternalError:
    return InternalError("the process that prepares large requests has died; the request may be retried")


def _prompt(message: wire.Encoded, fd: int) -> Prompt:
    size = message.count * 4
    if not message.count:
        return Prompt([], 0, 0)
    view = memoryview(mmap.mmap(fd, size + message.text, prot=mmap.PROT_READ))
    ids = view[:size].cast("i")
    text = str(view[size:], "utf-8") if message.text else None
    return Prompt(ids if message.count >= LIST_IDS else ids.tolist(), message.low, message.high, text)


class _Process(PipedChild[wire.FromWorker]):
    """One life of the process."""

    def __init__(
        self, module: str, *, on_message: Callable[[wire.FromWorker], None], on_exit: Callable[[int], None]
    ) -> None:
        super().__init__(
            module, wire.from_worker, on_message=lambda message, _fds: on_message(message), on_exit=on_exit,
            on_end=self.kill,
        )  # fmt: skip
        with contextlib.suppress(OSError):  # before it imports anything; its threads will inherit it
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self.pid, own + NICENESS)  # the kernel caps it at 19

    def send(self, message: wire.ToWorker, fds: Sequence[int] = ()) -> None:
        """It reads at any time, so that a packet that finds no room means that it is beyond help."""
        self.pipe.send(message, fds)
        if self.pipe.queued:
            self.kill()
