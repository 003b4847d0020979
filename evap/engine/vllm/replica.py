"""A vLLM engine as a Replica: start with progress, submit, cancel, batches, death, restart, stop.

States: STARTING -> READY -> FAILED -> (back-off) -> STARTING -> READY ...; STOPPED at the end. A start that can never
succeed (a bad option, a model that does not fit) raises StartupError from `start` and is not retried; a restart is,
for ever, because it has worked before.

Nothing of vLLM is imported before `start`, and then in a thread: the import alone takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from evap.child import pause_s
from evap.config import EngineConfig
from evap.engine.interface import OnBatch, OnState, known
from evap.engine.meter import Spec
from evap.engine.vllm import boot
from evap.engine.vllm.progress import OURS, progress_of, root_cause
from evap.engine.vllm.runs import Runs
from evap.engine.vllm.shared import RING_RECORDS, RingFiles, Shared, Usage, parse_lines
from evap.engine.vllm.turn import Turn
from evap.errors import OUTDATED, RESTART, EvapError, StartupError
from evap.messages import EngineInfo, GenerateRequest, ReplicaState, SamplingParams, TokenBatch
from evap.ring import RingReader

if TYPE_CHECKING:
    from evap.engine.vllm.client import Seam
    from evap.engine.vllm.mapping import Mapper
    from evap.engine.vllm.rows import Step

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
FIRST_BACKOFF_S: Final = 0.5
#: An engine that ran for so long has recovered: the next back-off begins at the first again.
HEALTHY_S: Final = 60.0


class VllmReplica:
    """One engine core (with its workers). `gpus`: the devices it may use; empty: vLLM's choice."""

    engines = 1
    runs_ahead = True  #: a step may be scheduled before the result of the last is known
    meters: Sequence[Spec] = ()

    def __init__(self, config: EngineConfig, model_path: Path, *, gpus: Sequence[int] = (), number: int = 0) -> None:
        self._config = config
        self._path = model_path
        self._gpus = gpus
        self._name = f"vllm {number}" if number else "vllm"
        self._state = ReplicaState.STARTING
        self._info: EngineInfo | None = None
        self._on_batch: OnBatch = lambda _batch: None
        self._on_state: OnState = lambda _state, _line: None
        self._runs = Runs()
        self._mapper: Mapper | None = None
        self._seam: Seam | None = None
        self._shared: Shared | None = None
        self._ring: RingReader | None = None
        self._ring_files: RingFiles | None = None
        self._index = 0  # our number among the processes that use the engine
        self._errors: list[str] = []
        self._revival: asyncio.Task[None] | None = None
        self._ready_at = 0.0
        self._failures = 0
        #: places of the token ring; set before `start`
        self.ring_records = RING_RECORDS
        #: starts after a death
        self.restarts = 0
        #: requests whose tokens or counts off the ring differ from the engine's own; never, unless there is a bug
        self.mismatches = 0

    # The contract

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def info(self) -> EngineInfo:
        return known(self._info)

    @property
    def running(self) -> int:
        """Generations that have been submitted and have not ended."""
        return len(self._runs)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that generations hold, as of the engine's last step; 0 without an engine."""
        usage = self._usage if self._state is ReplicaState.READY else None
        return usage.kv_usage if usage is not None else 0.0

    @property
    def beats(self) -> int:
        """Moves with each step, also with one of a prefill that gives no token yet."""
        return self._usage.beats if self._usage is not None else 0

    @property
    def step_since_ns(self) -> int:
        """When the step began that the engine computes; 0: none."""
        return self._usage.step_since_ns if self._usage is not None else 0

    @property
    def _usage(self) -> Usage | None:
        """What the engine says of itself."""
        return self._shared.usage if self._shared is not None else None

    @property
    def adapters(self) -> tuple[str, ...]:
        """LoRA adapters that a client may name as the model."""
        return tuple(self._mapper.adapters) if self._mapper is not None else ()

    def listen(self, on_batch: OnBatch, on_state: OnState) -> None:
        self._on_batch, self._on_state = on_batch, on_state

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._boot()
        except StartupError as e:
            self._set(ReplicaState.FAILED, e.message)
            await self._close()
            raise

    def check(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Raises InvalidRequest for what `submit` would refuse. May be called in a thread: the check of a grammar can
        take milliseconds, and `submit` remembers it."""
        if self._mapper is not None:
            self._mapper.check(sampling, prompt_ids)

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None:
        """Raises InvalidRequest or NotFound for what the engine cannot take; then nothing was submitted."""
        request_id = self._runs.open(slot, generation)
        if self._state is not ReplicaState.READY or self._mapper is None or self._seam is None:
            self._loop.call_soon(lambda: self._give(self._runs.fail([request_id])))
            return
        try:
            built = self._mapper.build(request, request_id, time.time())
        except EvapError:
            self._runs.forget(request_id)
            raise
        self._seam.add(built)

    def cancel(self, slot: int, generation: int) -> None:
        request_id = self._runs.find(slot, generation)
        if request_id is not None and self._seam is not None:
            self._seam.abort(request_id)

    async def stop(self) -> None:
        self._set(ReplicaState.STOPPED, "stopped")
        if self._revival is not None:
            self._revival.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._revival
        await self._close()
        self._give(self._runs.fail())

    # Starting

    def _share(self) -> Shared:
        return Shared(capacity=self.ring_records)

    def _make_seam(self, vllm_config: Any, _shared: Shared) -> Seam:
        return boot.seam(self._config, vllm_config, self)

    async def _boot(self) -> None:
        self._set(ReplicaState.STARTING, "loading vLLM")
        self._errors.clear()
        shared = self._shared = self._share()
        self._loop.add_reader(shared.log_fd, self._read_log)
        turn = Turn()
        try:
            vllm_config = await asyncio.to_thread(
                boot.configure, self._config, self._path, shared=shared, gpus=self._gpus, turn=turn
            )
            seam = self._seam = self._make_seam(vllm_config, shared)
            await seam.open(turn.end)
            await self._equip(seam, shared, vllm_config)
            self._info = boot.info(vllm_config)
        except (RuntimeError, ValueError, OSError, TimeoutError) as e:
            self._read_log()
            reason = root_cause(self._errors) or f"{type(e).__name__}: {e}"
            raise StartupError(f"vLLM did not start: {reason}", remedy="its log above says more") from e
        finally:
            turn.end()
        self._ready_at = time.monotonic()
        self._set(ReplicaState.READY, "ready")

    async def _equip(self, seam: Seam, shared: Shared, vllm_config: Any) -> None:
        """What a process needs that submits."""
        if self._config.token_path == "scheduler":  # noqa: S105  # a way for tokens, not a secret
            self._open_ring(self._make_ring(shared))
        self._mapper = await asyncio.to_thread(boot.mapper, vllm_config, self._config.lora)
        await self._install_meter(seam)

    def _make_ring(self, shared: Shared) -> RingFiles:
        return shared.ring

    def _open_ring(self, files: RingFiles) -> None:
        self._ring_files = files
        self._ring = RingReader(files.memory, files.capacity)
        self._loop.add_reader(files.bell_fd, self._read_bell)

    async def _install_meter(self, seam: Seam) -> None:
        """Our worker extension wraps the sampler."""
        if not self.meters:
            return
        settings = {"meter": self.meters[0], "client": self._index, "nonce": self._runs.nonce}
        try:
            found = await seam.call("collective_rpc", "evap_install", None, (settings,), None)
        except RuntimeError as e:
            raise StartupError(f"the meter cannot be installed in vLLM's worker: {e}") from e
        if not any(found or ()):
            logger.warning(
                "%s: tokens are not counted on the GPU, but where they arrive (pip install cupy-cuda13x)", self._name
            )

    # From the seam (client.Sink)

    def on_step(self, step: Step) -> None:
        if self._ring is not None:
            self._drain_ring()
        self._give(self._runs.step(step.slots, step.generations, step.tokens, step.rows))
        for account in step.accounts:
            complaint = self._runs.settle(account.request_id, account.count, account.fingerprint)
            if complaint is not None:
                self.mismatches += 1
                logger.error("%s: tokens do not reconcile: %s", self._name, complaint)

    def on_aborted(self, ids: Sequence[str]) -> None:
        self._drain_ring()
        self._give(self._runs.cancelled(ids))

    def on_death(self, reason: str) -> None:
        self._drain_ring()
        self._read_log()
        cause = root_cause(self._errors)
        if cause:
            reason = f"{reason} ({cause})"
        self._failures = 0 if time.monotonic() - self._ready_at > HEALTHY_S else self._failures + 1
        self._set(ReplicaState.FAILED, reason)
        self._give(self._runs.fail())
        if self._revival is None or self._revival.done():
            self._revival = self._loop.create_task(self._revive())

    async def _revive(self) -> None:
        """Start again, with growing pauses, until it works, it never can, or `stop` ends it."""
        while self._state is ReplicaState.FAILED:
            await self._close()
            pause = pause_s(self._failures, FIRST_BACKOFF_S)
            self._on_state(ReplicaState.FAILED, f"starting again in {pause:g} s")
            await asyncio.sleep(pause)
            self.restarts += 1
            try:
                await self._boot()
            except StartupError as e:
                self._failures += 1
                if OUTDATED in e.message:
                    self._set(ReplicaState.FAILED, f"{e.message}: {RESTART}")
                    return
                self._set(ReplicaState.FAILED, e.message)

    def _give(self, batch: TokenBatch | None) -> None:
        if batch is not None:
            self._on_batch(batch)

    # Shared memory and pipes

    def _read_bell(self) -> None:
        if self._ring_files is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ring_files.bell_fd, 1 << 16)
            self._drain_ring()

    def _drain_ring(self) -> None:
        while self._ring is not None and (batch := self._ring.poll()) is not None:
            self._give(self._runs.ring(batch))

    def _read_log(self) -> None:
        if self._shared is None:
            return
        try:
            data = os.read(self._shared.log_fd, 1 << 18)
        except BlockingIOError:
            return
        for level, process, message in parse_lines(data):
            logger.log(
                level if level >= logging.WARNING and OURS not in message else logging.DEBUG,
                "%s: %s: %s",
                self._name,
                process,
                message,
            )
            if level >= logging.ERROR:
                self._errors = [*self._errors[-19:], " ".join(message.split())]
            line = progress_of(message)
            if line and self._state is ReplicaState.STARTING:
                self._on_state(ReplicaState.STARTING, line)

    # The end

    def _set(self, state: ReplicaState, line: str) -> None:
        if self._state is not ReplicaState.STOPPED:
            self._state = state
            self._on_state(state, line)

    async def _close(self) -> None:
        await self._part()
        shared, self._shared = self._shared, None
        if shared is not None:
            self._loop.remove_reader(shared.log_fd)
            shared.close()

    async def _part(self) -> None:
        """Let go of the engine (and end it, if it is ours)."""
        seam, self._seam = self._seam, None
        if seam is not None:
            await seam.close(STOP_TIMEOUT_S)
        self._mapper = None
        files, self._ring_files = self._ring_files, None
        if files is not None:
            self._loop.remove_reader(files.bell_fd)
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def pids(self) -> list[int]:
        """Processes of the engine core; for tests and the doctor."""
        return self._seam.pids() if self._seam is not None else []
