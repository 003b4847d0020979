"""The process alone: what it does about the end of its parent, and about failures that are nobody's request."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evap.engine.tokenizer import load_text
from evap.errors import ContextOverflow, StartupError
from evap.intake import wire
from evap.intake.worker import load
from tests.engine.small_tokenizers import qwen, save
from tests.support import ROOT, TIME_FACTOR

SOON_S = 20 * TIME_FACTOR


class Parent:
    """One process, spoken to by hand."""

    def __init__(self, boot: wire.Boot) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(SOON_S)
        command = [sys.executable, "-m", "evap.intake.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, stderr=subprocess.PIPE)
        theirs.close()
        self.send(boot)

    def send(self, message: wire.ToWorker, fd: int = -1) -> None:
        if fd < 0:
            self.sock.send(wire.encode(message))
        else:
            socket.send_fds(self.sock, [wire.encode(message)], [fd])

    def next(self) -> Any:
        return wire.from_worker.decode(self.sock.recv(wire.MAX_PACKET))

    def file(self, body: bytes) -> int:
        fd = os.memfd_create("test")
        os.write(fd, body)
        return fd


@pytest.fixture
def parent() -> Iterator[Parent]:
    it = Parent(wire.Boot("", 1, 4, False))
    yield it
    it.sock.close()
    assert it.process.wait(SOON_S) == 0
    assert it.process.stderr is not None
    assert it.process.stderr.read() == b""
    it.process.stderr.close()


def test_one_job_by_hand(parent: Parent) -> None:
    assert parent.next() == wire.Ready()
    fd = parent.file(b'{"prompt":"ab\\u20ac","echo":true}')
    parent.send(wire.Parse(1, "completions"), fd)
    parsed = parent.next()
    assert os.fstat(fd).st_size == parsed.size  # the body is gone
    parent.send(wire.Encode(1, 0))
    done = parent.next()
    data = os.pread(fd, 1 << 16, 0)
    ids = array("i", data[: done.count * 4])
    assert (done.low, done.high) == (min(ids), max(ids))
    assert data[done.count * 4 :].decode() == "ab\u20ac"
    os.close(fd)


def test_messages_of_jobs_that_were_given_up(parent: Parent) -> None:
    assert parent.next() == wire.Ready()
    parent.send(wire.Parse(1, "completions"), parent.file(b'{"prompt":"a"}'))
    assert parent.next().job == 1
    parent.send(wire.Cancel(1))
    parent.send(wire.Parse(2, "completions"), parent.file(b'{"prompt":"a"}'))
    parent.send(wire.Cancel(2))
    parent.send(wire.Encode(2, 0))
    parent.send(wire.Parse(3, "completions"), parent.file(b'{"prompt":"a"}'))
    while (message := parent.next()).job != 3:
        assert message.job == 2
    assert isinstance(message, wire.Parsed)


def test_a_failure_is_told_with_its_traceback(parent: Parent) -> None:
    assert parent.next() == wire.Ready()
    parent.send(wire.Parse(1, "no such dialect"), parent.file(b"{}"))
    failed = parent.next()
    assert isinstance(failed, wire.Failed)
    assert "KeyError" in failed.trace
    parent.send(wire.Parse(2, "chat"), parent.file(b"{}"))
    assert isinstance(parent.next(), wire.Refused)


def test_the_end_of_the_parent_is_its_own_also_at_work(parent: Parent) -> None:
    """The fixture closes the socket while a prompt is tokenized that would take many seconds, and waits."""
    assert parent.next() == wire.Ready()
    parent.send(wire.Parse(1, "completions"), parent.file(b'{"prompt":"' + b"word " * (6 << 20) + b'"}'))
    assert parent.next().job == 1
    parent.send(wire.Encode(1, 0))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError):
        load(wire.Boot(str(tmp_path), 1, 4, False))


def test_the_tokenizer_and_template_of_a_model(tmp_path: Path) -> None:
    """The process's ids are those of this one; a prompt beyond the context is refused in the same words."""
    text = load_text(save(qwen(), tmp_path))
    messages = [{"role": "user", "content": "The quick brown fox jumps. " * 2000}]
    fd = os.memfd_create("test")
    parent = Parent(wire.Boot(str(tmp_path), 8, 4, False))
    assert parent.next() == wire.Ready()
    for job, limit in ((1, 0), (2, 5000)):
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"messages": messages}).encode(), 0)
        parent.send(wire.Parse(job, "chat"), fd)
        assert isinstance(parent.next(), wire.Parsed)
        parent.send(wire.Encode(job, limit))
        done = parent.next()
        text.limit_tokens = limit
        if not limit:
            assert array("i", os.pread(fd, done.count * 4, 0)).tolist() == text.chat_ids(messages, {})
        else:
            with pytest.raises(ContextOverflow) as own:
                text.chat_ids(messages, {})
            assert (done.kind, done.message) == ("ContextOverflow", own.value.message)
    os.close(fd)
    parent.sock.close()
    assert parent.process.wait(SOON_S) == 0
    assert parent.process.stderr is not None
    parent.process.stderr.close()
