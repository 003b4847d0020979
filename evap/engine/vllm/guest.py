"""An engine that several loop processes share, in each of them: it has been started by another (`host.py`).

States: STARTING -> READY when there is a way to it -> FAILED when it or the way has ended -> READY with the next way.
vLLM is imported here as well, for its checks of requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from evap.config import EngineConfig
from evap.engine.interface import How
from evap.engine.meter import Spec
from evap.engine.vllm import boot
from evap.engine.vllm.addresses import Address
from evap.engine.vllm.replica import VllmReplica
from evap.engine.vllm.runs import Runs
from evap.engine.vllm.shared import RING_RECORDS, RingFiles, Shared, Usage
from evap.engine.vllm.table import Table, open_table
from evap.engine.vllm.turn import Turn
from evap.errors import StartupError
from evap.messages import EngineInfo, ReplicaState

logger = logging.getLogger(__name__)

_LOGGING: Final = "VLLM_LOGGING_CONFIG_PATH"


class VllmGuest(VllmReplica):
    """ask: called with our counters page when a way is wanted: at the start, and when one has ended."""

    def __init__(self, config: EngineConfig, model_path: Path, ask: Callable[[Spec | None], None]) -> None:
        super().__init__(config, model_path)
        self._ask = ask
        self._vllm_config: Any = None
        self._led = asyncio.Event()
        self._folder = Path()  # of the host
        self._host_usage: Usage | None = None

    async def start(self) -> None:
        """Return when the first way is there. Raises StartupError."""
        self._loop = asyncio.get_running_loop()
        shared = self._shared = Shared()
        self._loop.add_reader(shared.log_fd, self._read_log)
        before = os.environ.get(_LOGGING)
        os.environ[_LOGGING] = shared.logging_file()  # read when vLLM is imported
        turn = Turn()
        try:
            self._vllm_config = await asyncio.to_thread(
                boot.configure, self._config, self._path, shared=shared, gpus=(), turn=turn
            )
        except StartupError:
            await self._close()
            raise
        finally:
            turn.end()
            if before is None:
                del os.environ[_LOGGING]
            else:
                os.environ[_LOGGING] = before
        self._want()
        await self._led.wait()

    def _want(self) -> None:
        self._ask(next(iter(self.meters), None))

    def attach(self, how: How, info: EngineInfo, fds: Sequence[int]) -> None:
        table = open_table(fds[0])
        former, self._revival = self._revival, self._loop.create_task(self._lead(how, info, table, self._revival))
        if former is not None:
            former.cancel()

    async def _lead(self, how: How, info: EngineInfo, table: Table, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            await asyncio.wait([former])
        await self._part()
        self._give(self._runs.fail())
        self._runs = Runs(table)
        self._info, self._index = info, int(how["index"])
        self._vllm_config.model_config.max_model_len = info.max_model_len
        try:
            await self._reach(how)
        except (RuntimeError, OSError, TimeoutError, StartupError) as e:
            logger.error("no way to the engine: %s", e)
            self._lost(f"no way to the engine: {e}")
            return
        self._set(ReplicaState.READY, "ready")
        self._led.set()

    async def _reach(self, how: How) -> None:
        address = Address(self._index, str(how["input"]), str(how["output"]))
        seam = self._seam = boot.guest_seam(self._vllm_config, self, address)
        await seam.open(lambda: None)
        self._folder = Path(str(how["folder"]))
        self._host_usage = Usage(self._folder)
        assert self._shared is not None
        await self._equip(seam, self._shared, self._vllm_config)

    @property
    def _usage(self) -> Usage | None:
        return self._host_usage

    def _make_ring(self, _shared: Shared) -> RingFiles:
        """Where the scheduler in the engine looks for it when it sees our first request."""
        folder = self._folder / self._runs.nonce
        folder.mkdir(mode=0o700)
        return RingFiles(folder, RING_RECORDS)

    async def _part(self) -> None:
        usage, self._host_usage = self._host_usage, None
        if usage is not None:
            usage.close()
        files = self._ring_files
        await super()._part()
        if files is not None:
            files.close()

    def engine_is(self, state: ReplicaState, line: str) -> None:
        if state is ReplicaState.STARTING:
            if self._state is not ReplicaState.READY:
                self._set(state, line)
        elif state is not ReplicaState.READY:
            if self._revival is not None:
                self._revival.cancel()
            self._lost(line)

    def on_death(self, reason: str) -> None:
        """From the seam: the engine says so, or takes no requests."""
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        self._drain_ring()
        self._set(ReplicaState.FAILED, reason)
        self._give(self._runs.fail())
        if self._vllm_config is not None and self._state is not ReplicaState.STOPPED:
            self._want()
