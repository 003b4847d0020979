"""Code that is replaced on disk while the server runs: one error, and no loop of starts."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from evap.engine.supervisor import TorchReplica
from evap.errors import OUTDATED, RESTART, StartupError
from evap.messages import Finish, ReplicaState
from tests.engine import fake_worker
from tests.engine.test_supervisor import Listener, request, run, started


@pytest.mark.parametrize(
    ("module", "name", "value", "what"),
    [
        ("evap.ring", "RING_VERSION", 99, "token ring of version 99"),
        ("evap.engine.torch.wire", "CONTRACT", "of another version", "the messages between them"),
    ],
)
def test_an_upgrade_in_place_ends_in_one_clear_error(
    module: str, name: str, value: object, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that starts again has other code than the server: it says so once, and is not started again."""

    async def test(replica: TorchReplica, listener: Listener) -> None:
        monkeypatch.setattr(f"{module}.{name}", value)  # what the server has in memory is not what is on disk
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        await listener.until(lambda: OUTDATED in listener.lines[-1])
        assert what in listener.lines[-1]
        assert listener.lines[-1].endswith(RESTART)
        assert replica.state is ReplicaState.FAILED
        assert not replica._worker
        assert not replica._restart
        replica.submit(1, 1, request(fake_worker.COUNT))
        assert (await listener.end(1, 1))[0] is Finish.ERROR

    run(test)


def test_a_message_that_a_worker_cannot_read_is_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Boot(msgspec.Struct, tag="boot", array_like=True):
        version: str

    monkeypatch.setattr("evap.engine.torch.wire.Boot", lambda *fields: Boot("new"))

    async def main() -> None:
        async with started():
            pytest.fail("started")

    with pytest.raises(StartupError, match=OUTDATED):
        asyncio.run(main())
