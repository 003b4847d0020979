"""The intake process: `python -m evap.intake.worker SOCKET` (an inherited descriptor).

One job at a time, on the main thread; a second thread reads the socket, so that the end of the server and a cancel are
noticed while a body is parsed or tokenized. A cancel comes to the main thread as a signal, which ends the job at the
next bytecode; the tokenizer returns to Python every few ten milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from array import array
from pathlib import Path
from typing import Final

import numpy as np

from evap.engine.interface import Text
from evap.errors import EvapError
from evap.intake import wire
from evap.messages import ParsedRequest
from evap.protocol.api.dialect import Dialect
from evap.protocol.api.router import dialects

_PR_SET_PDEATHSIG: Final = 1
_WAKE: Final = signal.SIGUSR1


class _Cancelled(BaseException):
    """The job at hand is not wanted any more."""


class Worker:
    """`inbox`: messages in order, `Parse` with its descriptor. `running`: the job that a signal may end, or 0.

    `cancelled`: the last one. Jobs are numbered in order and come one by one, so those before it are over too.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: queue.SimpleQueue[tuple[wire.ToWorker, int]] = queue.SimpleQueue()
        self._early: tuple[wire.ToWorker, int] | None = None
        self._running = self._cancelled = 0
        self._file = -1
        self._main = threading.get_ident()
        self._text: Text
        self._dialects: dict[str, Dialect]
        self._max_choices = 0

    def boot(self) -> None:
        signal.signal(_WAKE, self._woken)
        threading.Thread(target=self._read, name="evap-intake-socket", daemon=True).start()
        message, _ = self._inbox.get()
        assert isinstance(message, wire.Boot)
        self._dialects = dialects(structured_output=message.structured_output)
        self._max_choices = message.max_choices
        self._text = load(message)
        self._send(wire.Ready())

    def serve(self) -> None:
        """Until the server ends."""
        while True:
            with contextlib.suppress(_Cancelled):
                self._tidy()
                self._job()

    # The main thread

    def _tidy(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _job(self) -> None:
        message, self._file = self._take()
        if not isinstance(message, wire.Parse):
            return  # of a job that has been given up
        job = message.job
        try:
            self._begin(job)
            request = self._parse(message)
            self._running = 0  # a message must not get lost
            go, descriptor = self._take()
            if not isinstance(go, wire.Encode) or go.job != job:
                self._early = go, descriptor
                return
            self._begin(job)
            self._text.limit_tokens = go.limit_tokens
            self._encode(job, request)
        except EvapError as error:
            self._send(wire.refused(job, error))
        except Exception:  # noqa: BLE001 - whatever a template or tokenizer raises, the server logs it
            self._send(wire.Failed(job, traceback.format_exc()[-wire.MAX_TRACE_CHARS :]))
        finally:
            self._running = 0

    def _begin(self, job: int) -> None:
        self._running = job
        if job <= self._cancelled:
            raise _Cancelled

    def _take(self) -> tuple[wire.ToWorker, int]:
        early, self._early = self._early, None
        return early or self._inbox.get()

    def _parse(self, message: wire.Parse) -> ParsedRequest:
        with open(self._file, "r+b", closefd=False) as file:
            file.seek(0)
            body = file.read()
        os.ftruncate(self._file, 0)
        request = self._dialects[message.dialect].parse(body, max_choices=self._max_choices)
        head = wire.bare(request)
        self._write(0, head)
        self._send(wire.Parsed(message.job, len(head)))
        return request

    def _encode(self, job: int, request: ParsedRequest) -> None:
        text = b""
        if request.messages is not None:
            ids = array("i", self._text.chat_ids(request.messages, dict(request.template_args)))
        elif request.prompt_ids is not None:
            ids = array("i", request.prompt_ids)
        else:
            ids = array("i", self._text.encode(request.prompt_text or ""))
            text = (request.prompt_text or "").encode() if request.echo else b""
        os.ftruncate(self._file, 0)
        self._write(0, ids.tobytes())
        self._write(ids.itemsize * len(ids), text)
        low, high = (int(np.min(ids)), int(np.max(ids))) if ids else (0, 0)
        self._send(wire.Encoded(job, len(ids), low, high, len(text)))

    def _write(self, at: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            done = os.pwrite(self._file, left, at)
            left, at = left[done:], at + done

    def _send(self, message: wire.FromWorker) -> None:
        self._sock.sendall(wire.encode(message))

    def _woken(self, number: int, frame: object) -> None:
        if 0 < self._running <= self._cancelled:
            self._running = 0  # raised once
            raise _Cancelled

    # The other thread

    def _read(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._sock, wire.MAX_PACKET, 1)
            if not data:
                os._exit(0)  # the server has ended, or has given this process up
            message = wire.to_worker.decode(data)
            if isinstance(message, wire.Cancel):
                self._cancelled = message.job
                signal.pthread_kill(self._main, _WAKE)
            self._inbox.put((message, descriptors[0] if descriptors else -1))


def load(boot: wire.Boot) -> Text:
    """The same text side as the server's own."""
    if not boot.path:
        from evap.engine.synthetic_text import SyntheticText  # noqa: PLC0415 - one of the two is needed

        return SyntheticText()
    from evap.engine.tokenizer import load_text  # noqa: PLC0415

    return load_text(Path(boot.path), cache_mb=boot.token_cache_mb)


def main(argv: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, which is the server's business
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = Worker(socket.socket(fileno=int(argv[0])))
    worker.boot()
    worker.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
