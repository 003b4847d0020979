"""A child process: what it is given, the moment of its end, and how that is said."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evap import child
from evap.child import Child
from tests.support import TIME_FACTOR

PATIENCE_S = 10.0 * TIME_FACTOR


def life(statement: str, act: int = 0) -> list[int]:
    """The exit statuses that are reported of a process that runs `statement`; `act`: a signal for it."""

    async def main() -> list[int]:
        statuses: list[int] = []
        gone = asyncio.Event()

        def exited(status: int) -> None:
            statuses.append(status)
            gone.set()

        it = Child("timeit", ["-n1", "-r1", statement], [], on_exit=exited)
        if act:
            os.kill(it.pid, act)
        async with asyncio.timeout(PATIENCE_S):
            await gone.wait()
        it.kill()  # too late: nothing happens
        it.end()
        await asyncio.sleep(0)
        return statuses

    return asyncio.run(main())


def test_its_end_is_reported_once() -> None:
    assert life("import os; os._exit(3)") == [3]
    assert life("import time; time.sleep(99)", signal.SIGKILL) == [-signal.SIGKILL]


def test_it_finds_this_package_and_inherits_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its working directory is."""
    monkeypatch.chdir(tmp_path)
    ours, theirs = os.pipe()
    statement = f"import evap, os; os.write({theirs}, evap.__file__.encode()); os.write(1, b'')"
    assert child.start("timeit", ["-n1", "-r1", statement], [theirs]).wait() == 0
    os.close(theirs)
    with open(ours) as said:
        assert said.read() == str(Path(child.__file__).with_name("__init__.py"))


def test_openmp_threads_wait_with_a_short_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert child.environment()["GOMP_SPINCOUNT"] == "2000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert child.environment()["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "GOMP_SPINCOUNT" not in child.environment()


def test_a_process_that_cannot_be_watched_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"]))
        return started[0]

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError("too many open files")

    async def main() -> None:
        monkeypatch.setattr(child, "start", begin)
        monkeypatch.setattr(os, "pidfd_open", refuse)
        with pytest.raises(OSError, match="too many"):
            Child("timeit", [], [], on_exit=lambda status: None)

    asyncio.run(main())
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("status", "said"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")],
)
def test_how_an_end_is_said(status: int, said: str) -> None:
    assert child.describe_end(status) == said


def test_pauses_double_and_have_an_end_after_any_number_of_failures() -> None:
    """Until 2**1024, which no float holds: an engine that is down for a night must start in the morning."""
    assert [child.pause_s(failures, 0.5) for failures in (0, 1, 2, 5, 6, 5000)] == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0]
