"""An engine without a model: paced, deterministic tokens for load tests, protocol tests and fault tests.

What a generation says is in `synthetic_script.py`: a function of its prompt and seed (None is 0). It obeys max_tokens,
stop token ids, ignore_eos, min_tokens and logprobs; EOS comes after `synthetic_tokens` tokens of text.

Work per token is numpy over dense rows: row k of every array is a running generation; a leaver's place is taken by
the last row. Between joins, ends and wraps of a text nothing but `cursor` and `index` moves, and `_quiet` says for how
many steps that holds. One timer drives everything; one step makes one TokenBatch.

The model name `synthetic-faults` lets a prompt do harm: `fault:fail` kills the engine (it is back after a second),
`fault:hang` stops it for good.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from evap.config import EngineConfig
from evap.engine.interface import Clock, OnBatch, OnState
from evap.engine.meter import Spec
from evap.engine.synthetic_script import Script, Three, score
from evap.engine.synthetic_text import SyntheticText
from evap.messages import NO_TOKEN, EngineInfo, Finish, GenerateRequest, Int32, ReplicaState, SamplingParams, TokenBatch

__all__ = ["SyntheticReplica", "SyntheticText"]

DEFAULT_CONTEXT: Final = 1 << 18
RESTART_S: Final = 1.0
_TEXT: Final = SyntheticText()
_NEVER: Final = 1 << 60
#: A loop may call a timer early by its clock's resolution.
_EARLY_S: Final = 1e-6


class _Work:
    """A submitted generation until its final record. Queued: not admitted; then silent until `row` is a running row."""

    __slots__ = ("admitted", "count", "generation", "region", "request", "row", "slot")

    def __init__(self, slot: int, generation: int, request: GenerateRequest) -> None:
        self.slot, self.generation, self.request = slot, generation, request
        self.admitted = False
        self.row = -1
        self.region = -1  # of the arena, for a canary
        self.count = 0  # tokens made, once it has left the rows


class _Rows:
    """The running generations as columns of `table`, dense.

    A row's text is arena[base:stop], endlessly; `cursor` is its next token. `index` counts tokens made, `end` is how
    many there will be; the last one is `last_token` (-1: as the text goes) with `last_flags`.
    """

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self.work: list[_Work] = []
        self.table = np.zeros((9, capacity), np.int32)
        self.slot, self.generation, self.base, self.stop, self.cursor = self.table[:5]
        self.index, self.end, self.last_token, self.last_flags = self.table[5:]

    def add(self, work: _Work, text: Three, ending: Three) -> None:
        work.row = self.count
        self.table[:, work.row] = (work.slot, work.generation, *text, 0, *ending)
        self.work.append(work)
        self.count += 1

    def remove(self, work: _Work) -> None:
        row, moved = work.row, self.work.pop()
        self.count -= 1
        work.row, work.count = -1, int(self.index[row])
        if moved is not work:
            self.table[:, row] = self.table[:, self.count]
            self.work[row] = moved
            moved.row = row

    def quiet(self) -> int:
        """Steps until a row ends or comes to the end of its text."""
        n = self.count
        if not n:
            return _NEVER
        return int(min((self.end[:n] - self.index[:n]).min(), (self.stop[:n] - self.cursor[:n]).min()))


def _frozen(values: Int32) -> Int32:
    values = values.copy()
    values.setflags(write=False)
    return values


class SyntheticReplica:
    """`Replica` in the loop's own thread. Raises StartupError never; starts at once."""

    adapters: tuple[str, ...] = ()
    engines = 0  # it samples in the loop's own thread: what it has made is what the loop has counted
    runs_ahead = False
    meters: Sequence[Spec] = ()

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        self.state = ReplicaState.STARTING
        self.config = config
        self._clock = clock
        self._ttft_s, self._step_s = config.synthetic_ttft_ms / 1e3, config.synthetic_step_ms / 1e3
        self._context = config.max_model_len or DEFAULT_CONTEXT
        self._faults = config.model == "synthetic-faults"
        self._on_batch: OnBatch = lambda batch: None
        self._on_state: OnState = lambda state, line: None
        self._script = Script(config.max_running)
        self._live: dict[int, _Work] = {}
        self._queue: list[tuple[int, int, _Work]] = []
        self._prefill: deque[tuple[float, _Work]] = deque()
        self._rows = _Rows(config.max_running)
        self._admitted = self._submitted = self._step = 0
        self._quiet = _NEVER
        self._next_step = 0.0
        self._armed = self._hung = False
        self._endings: list[tuple[_Work, Finish]] = []
        self._refresh()

    @property
    def info(self) -> EngineInfo:
        if self.state is ReplicaState.STARTING:
            raise RuntimeError("the engine has not started")
        return EngineInfo(
            engine="synthetic",
            device="none",
            dtype="none",
            max_model_len=self._context,
            vocab_size=SyntheticText.vocab_size,
            max_running=self.config.max_running,
        )

    def check(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Nothing beyond check_request."""

    def listen(self, on_batch: OnBatch, on_state: OnState) -> None:
        self._on_batch, self._on_state = on_batch, on_state

    async def start(self) -> None:
        self._become(ReplicaState.READY, "synthetic engine, no model")

    async def stop(self) -> None:
        self.state = ReplicaState.STOPPED
        self._drop_all()
        self._become(ReplicaState.STOPPED, "")

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None:
        work = _Work(slot, generation, request)
        if self.state is not ReplicaState.READY:
            self._ending(work, Finish.ERROR)
            return
        if slot in self._live:
            raise ValueError(f"slot {slot} is running")
        self._live[slot] = work
        self._submitted += 1
        heapq.heappush(self._queue, (request.priority, self._submitted, work))
        if self._faults:
            self._do_harm(_TEXT.decode(request.prompt_ids[-4096:]))
        self._admit()
        self._arm()

    def cancel(self, slot: int, generation: int) -> None:
        work = self._live.get(slot)
        if work is not None and work.generation == generation:
            self._leave(work)
            self._ending(work, Finish.CANCELLED)
            self._admit()

    # Faults, for tests.

    def fail(self, reason: str, restart_s: float | None = None) -> None:
        """Die: every generation ends with ERROR. With restart_s, be READY again after so many seconds."""
        self.state = ReplicaState.FAILED  # first, or what is told of the end would be given new work
        self._drop_all()
        self._become(ReplicaState.FAILED, reason)
        if restart_s is not None:
            self._clock.call_later(restart_s, self._restart)

    def hang(self) -> None:
        """Fall silent: no token, no confirmation of a cancel, until `resume`."""
        self._hung = True

    def resume(self) -> None:
        self._hung = False
        self._clock.call_soon(self._flush)
        self._arm()

    def _restart(self) -> None:
        if self.state is ReplicaState.FAILED:
            self._become(ReplicaState.READY, "started again")

    def _do_harm(self, prompt: str) -> None:
        if "fault:fail" in prompt:
            self._clock.call_soon(lambda: self.fail("the prompt asked for it", RESTART_S))
        elif "fault:hang" in prompt:
            self.hang()

    def _become(self, state: ReplicaState, line: str) -> None:
        self.state = state
        self._on_state(state, line)

    # Life of a generation: queue -> prefill -> rows -> left; an ending is confirmed in the next loop pass.

    def _admit(self) -> None:
        while self._queue and self._admitted < self.config.max_running:
            work = heapq.heappop(self._queue)[2]
            if self._live.get(work.slot) is work:
                work.admitted = True
                self._admitted += 1
                self._prefill.append((self._clock.time() + self._ttft_s, work))

    def _join_ready(self, now: float) -> None:
        while self._prefill and self._prefill[0][0] <= now:
            work = self._prefill.popleft()[1]
            if self._live.get(work.slot) is work:
                text, work.region = self._script.text(work.request)
                self._rows.add(work, text, self._plan(work.request, text))
                self._stale = True

    def _leave(self, work: _Work) -> None:
        del self._live[work.slot]
        self._admitted -= work.admitted
        if work.row >= 0:
            self._rows.remove(work)
            self._stale = True
        self._script.release(work.region)

    def _drop_all(self) -> None:
        self._hung = False
        for work in list(self._live.values()):
            self._leave(work)
            self._endings.append((work, Finish.ERROR))
        self._queue.clear()
        self._prefill.clear()
        self._flush()

    def _ending(self, work: _Work, finish: Finish) -> None:
        if not self._endings:
            self._clock.call_soon(self._flush)
        self._endings.append((work, finish))

    def _flush(self) -> None:
        """The bare final records of what ended outside a step."""
        if self._hung or not self._endings:
            return
        endings, self._endings = self._endings, []
        columns = [(w.slot, w.generation, w.count, finish | NO_TOKEN) for w, finish in endings]
        slot, generation, index, flags = np.array(columns, np.int32).T
        self._on_batch(
            TokenBatch(slot, generation, np.zeros(len(slot), np.int32), index, flags.astype(np.uint8), self._step)
        )

    def _plan(self, request: GenerateRequest, text: Three) -> Three:
        room = max(1, self._context - len(request.prompt_ids))
        return self._script.plan(request.sampling, text, self.config.synthetic_tokens, room)

    # Time.

    def _arm(self) -> None:
        if self._armed or self._hung or not (self._rows.count or self._prefill):
            return
        self._armed = True
        due = self._next_step if self._rows.count else self._prefill[0][0]
        delay = due - self._clock.time()
        if delay > 0:
            self._clock.call_later(delay, self._tick)
        else:
            self._clock.call_soon(self._tick)

    def _tick(self) -> None:
        self._armed = False
        if self._hung:
            return
        now = self._clock.time()
        idle = not self._rows.count
        self._join_ready(now + _EARLY_S)
        if self._rows.count and (idle or now + _EARLY_S >= self._next_step):
            late = now - self._next_step
            self._next_step = now + self._step_s if idle or late > self._step_s else self._next_step + self._step_s
            self._make_step()
        self._admit()
        self._arm()

    def _refresh(self) -> None:
        """Anew what only changes when rows come, go or wrap."""
        rows, n = self._rows, self._rows.count
        self._slot, self._generation = _frozen(rows.slot[:n]), _frozen(rows.generation[:n])
        self._no_flags = np.zeros(n, np.uint8)
        self._no_flags.setflags(write=False)
        self._quiet = rows.quiet()
        self._scored = [w for w in rows.work if w.request.sampling.logprobs is not None]
        self._stale = False

    def _make_step(self) -> None:
        if self._stale:
            self._refresh()
        rows, n = self._rows, self._rows.count
        token, index, flags = self._script.arena[rows.cursor[:n]], rows.index[:n].copy(), self._no_flags
        rows.cursor[:n] += 1
        rows.index[:n] += 1
        self._step += 1
        self._quiet -= 1
        ended: list[_Work] = []
        if self._quiet <= 0:
            self._stale = True
            rows.cursor[:n] = np.where(rows.cursor[:n] == rows.stop[:n], rows.base[:n], rows.cursor[:n])
            last = np.flatnonzero(rows.index[:n] >= rows.end[:n])
            flags = flags.copy()
            flags[last] = rows.last_flags[last]
            token[last] = np.where(rows.last_token[last] >= 0, rows.last_token[last], token[last])
            ended = [rows.work[row] for row in last.tolist()]
        batch = TokenBatch(self._slot, self._generation, token, index, flags, self._step)
        if self._scored:
            score(batch, {w.row: w.request.sampling.logprobs or 0 for w in self._scored})
        for work in ended:
            self._leave(work)
        self._on_batch(batch)
