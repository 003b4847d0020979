"""An engine that several loop processes share, in the process that starts it, watches it and starts it again.

It submits nothing. Of each loop process it has a table of what runs (`table.py`): when the process is gone, that is
aborted, at once and again before another takes its place (the dead one's last requests may still have been under way).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evap.config import EngineConfig
from evap.engine.interface import Hand
from evap.engine.meter import Spec
from evap.engine.vllm import boot
from evap.engine.vllm.addresses import Address, addresses
from evap.engine.vllm.replica import VllmReplica
from evap.engine.vllm.shared import Shared
from evap.engine.vllm.table import Table, make_memory, open_table
from evap.messages import ReplicaState

if TYPE_CHECKING:
    from evap.engine.vllm.client import Seam


class VllmHost(VllmReplica):
    """processes: that will use the engine; they are numbered from 0, and from 1 among vLLM's clients."""

    def __init__(self, config: EngineConfig, model_path: Path, processes: int) -> None:
        super().__init__(config, model_path)
        self._processes = processes
        self._tables: dict[int, Table] = {}
        self._addresses: list[Address] = []
        self._leading: dict[int, asyncio.Task[None]] = {}

    @property
    def pid(self) -> int | None:
        return next(iter(self.pids()), None)

    def _share(self) -> Shared:
        return Shared(many=True)

    def _make_seam(self, vllm_config: Any, shared: Shared) -> Seam:
        self._tables.clear()  # of another engine
        self._addresses = addresses(shared.path, 1 + self._processes)
        return boot.host_seam(vllm_config, self, self._addresses)

    async def _equip(self, seam: Seam, shared: Shared, vllm_config: Any) -> None:
        """It submits nothing."""

    def lead(self, number: int, meter: Spec | None, hand: Hand, linger_s: float) -> None:
        """The process installs its counters page itself, and vLLM's engine ends with its host (interface.Host)."""
        self._leading[number] = self._loop.create_task(self._lead(number, hand))

    def gone(self, number: int) -> None:
        if (leading := self._leading.pop(number, None)) is not None:
            leading.cancel()
        self._abort(number)

    def _abort(self, number: int) -> None:
        table = self._tables.get(number)
        if table is not None and self._seam is not None and self._state is ReplicaState.READY:
            for request_id in table.ids():
                self._seam.abort(request_id)

    async def _lead(self, number: int, hand: Hand) -> None:
        seam, shared = self._seam, self._shared
        if seam is None or shared is None:
            return
        self._abort(number)
        await asyncio.sleep(0)  # aborts leave at the end of this pass of the loop
        try:
            await seam.call("is_scheduler_paused")
        except RuntimeError:  # the engine has died
            return
        if (old := self._tables.get(number)) is not None and old.nonce:
            shutil.rmtree(shared.path / old.nonce, ignore_errors=True)
        fd = make_memory()
        self._tables[number] = open_table(os.dup(fd))
        index, input, output = self._addresses[1 + number]
        how: dict[str, str | int] = {"index": index, "input": input, "output": output, "folder": str(shared.path)}
        hand(how, self.info, [fd])
        os.close(fd)
