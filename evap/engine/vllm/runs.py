"""Which engine request is which slot, and a step's output as one TokenBatch. No I/O, no vLLM.

A run lives from `open` to exactly one record with a Finish. Its request id is unique for the life of the process and
names the slot (see ids.py), so that code in the engine's processes can find the slot without being told.

Three ways lead tokens here, and each run uses one at a time:
- `step`: the engine's own messages (one plain token each in the common case: arrays, no Python object a token);
- `ring`: records that the scheduler wrote into shared memory. The last message of such a request carries only the
  engine's own count and fingerprint of all its tokens, and `settle` compares them with what came out of the ring;
- `cancelled` and `fail`: no tokens, the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from evap.arrays import every
from evap.engine.vllm import ids
from evap.engine.vllm.shared import FINGERPRINT_SEED, Prints, fingerprints
from evap.engine.vllm.table import SLOTS, Table
from evap.messages import (
    FINISH_MASK,
    HAS_LOGPROBS,
    META,
    NO_TOKEN,
    SILENT,
    Finish,
    Int32,
    TokenBatch,
    TokenLogprobs,
    UInt8,
)


class Row(msgspec.Struct, gc=False, kw_only=True):
    """Anything but one plain token: several tokens, none, an end, log probabilities, facts about the prompt."""

    request_id: str
    tokens: Sequence[int] = ()
    finish: Finish = Finish.NONE
    #: the last token counts but is not text (end of sequence, or a stop token id)
    silent: bool = False
    #: one entry per token
    logprobs: Sequence[TokenLogprobs] | None = None
    #: prompt tokens that the prefix cache had; comes at most once
    cached: int | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None


class _Run:
    __slots__ = ("generation", "marked", "request_id", "slot")

    def __init__(self, request_id: str, slot: int, generation: int) -> None:
        self.request_id = request_id
        self.slot = slot
        self.generation = generation
        self.marked = False  # its META record has gone out


class Runs:
    """The runs of one engine process that this one has asked for. table: where to keep them; None: our own memory."""

    def __init__(self, table: Table | None = None) -> None:
        table = table if table is not None else Table()
        #: of all their ids
        self.nonce = table.begin()
        self._number = table.number
        self._numbers = itertools.count()
        self._runs: dict[str, _Run] = {}
        self._at: dict[int, _Run] = {}  # slot -> its run
        self._live: Int32 = table.live
        self._count: Int32 = np.zeros(SLOTS, np.int32)  # slot -> tokens so far
        self._prints: Prints = np.zeros(SLOTS, np.uint64)  # slot -> fingerprint of the tokens off the ring
        self._ended: dict[str, tuple[int, int]] = {}  # ended on the ring, not yet settled: (count, fingerprint)
        self._slots: Int32 | None = None  # of the last plain step, if all of them still run
        self._places: npt.NDArray[np.intp] = np.empty(0, np.intp)  # the same, as numpy indexes fastest
        self.steps = 0

    def __len__(self) -> int:
        return len(self._runs)

    def open(self, slot: int, generation: int) -> str:
        """Begin a run. Returns its request id."""
        if slot in self._at:
            raise ValueError(f"slot {slot} is still in use")
        number = next(self._numbers) & 0xFFFFFFFF
        request_id = ids.make(self.nonce, number, slot, generation)
        run = self._runs[request_id] = self._at[slot] = _Run(request_id, slot, generation)
        self._number[slot] = number
        self._live[slot] = run.generation
        self._count[slot] = 0
        self._prints[slot] = FINGERPRINT_SEED
        return request_id

    def forget(self, request_id: str) -> None:
        """A run that never began: no record comes of it."""
        self._close(self._runs[request_id])

    def find(self, slot: int, generation: int) -> str | None:
        """The request id of a run that has not ended."""
        run = self._at.get(slot)
        return run.request_id if run is not None and run.generation == generation else None

    # The engine's own messages

    def step(self, slots: Int32, generations: Int32, tokens: Int32, rows: Sequence[Row] = ()) -> TokenBatch | None:
        """One engine step. The arrays: requests with exactly one plain token each; `rows`: all others.

        Requests that are not running (cancelled, or of a dead engine) are ignored. None when nothing is left. The very
        same array of slots again means the same requests: it must not be written to.
        """
        self.steps += 1
        batch = self._plain(slots, generations, tokens) if len(slots) else None
        if not rows:
            return batch
        return _joined(batch, self._rows(rows), self.steps)

    def _plain(self, slots: Int32, generations: Int32, tokens: Int32) -> TokenBatch | None:
        again = slots is self._slots
        if not again:
            live = self._live[slots] == generations
            self._slots = slots
            if not every(live):
                self._slots = None
                slots, generations, tokens = slots[live], generations[live], tokens[live]
                if not len(slots):
                    return None
            self._places = slots.astype(np.intp)
        places = self._places
        index = self._count[places]
        self._count[places] = index + 1  # a request has one plain token in a step, so no slot comes twice
        flags = np.zeros(len(slots), np.uint8)
        return TokenBatch(slots, generations, tokens, index, flags, self.steps, steady=again or bool(index.all()))

    def _rows(self, rows: Sequence[Row]) -> TokenBatch | None:
        found = _Records()
        for row in rows:
            run = self._runs.get(row.request_id)
            if run is None:
                continue
            if (row.cached is not None or row.prompt_logprobs is not None) and not run.marked:
                run.marked = True
                found.add(run, row.cached or 0, 0, META, prompt=row.prompt_logprobs)
            self._row(run, row, found)
            if row.finish is not Finish.NONE:
                self._close(run)
        return found.batch(self.steps)

    def _row(self, run: _Run, row: Row, found: _Records) -> None:
        index = int(self._count[run.slot])
        last = len(row.tokens) - 1
        for n, token in enumerate(row.tokens):
            flags = int(row.finish) | (SILENT if row.silent else 0) if n == last else 0
            found.add(run, token, index + n, flags, logprobs=row.logprobs[n] if row.logprobs is not None else None)
        if last < 0 and row.finish is not Finish.NONE:
            found.add(run, 0, index, int(row.finish) | NO_TOKEN)
        self._count[run.slot] = index + last + 1

    def _close(self, run: _Run) -> None:
        del self._runs[run.request_id], self._at[run.slot]
        self._live[run.slot] = -1
        self._slots = None

    # The ring

    def ring(self, batch: TokenBatch) -> TokenBatch | None:
        """Records of live runs, as they came off the ring; late ones of runs that have ended are dropped."""
        live = self._live[batch.slot] == batch.generation
        if not live.all():
            columns = (batch.slot, batch.generation, batch.token, batch.index, batch.flags)
            batch = TokenBatch(*(column[live] for column in columns))
            if not len(batch):
                return None
        self.steps += 1
        batch.step = self.steps
        carries = (batch.flags & np.uint8(NO_TOKEN | META)) == 0
        slots = batch.slot[carries]
        np.add.at(self._count, slots, 1)
        np.add.at(self._prints, slots, fingerprints(batch.token[carries], batch.index[carries]))
        for n in np.flatnonzero(batch.flags & np.uint8(FINISH_MASK)):
            run = self._at[int(batch.slot[n])]
            self._ended[run.request_id] = int(self._count[run.slot]), int(self._prints[run.slot])
            self._close(run)
        return batch

    def settle(self, request_id: str, count: int, fingerprint: int) -> str | None:
        """The engine's own account of a request that ended on the ring. Returns what differs, or None."""
        found = self._ended.pop(request_id, None)
        if found is None or found == (count, fingerprint):  # None: it was cancelled meanwhile
            return None
        if found[0] != count:
            return f"{request_id}: the engine counts {count} tokens, {found[0]} came off the ring"
        return f"{request_id}: {count} tokens came off the ring, but not those that the engine made"

    @property
    def unsettled(self) -> int:
        return len(self._ended)

    # Ends without tokens

    def cancelled(self, request_ids: Iterable[str]) -> TokenBatch | None:
        """The engine has confirmed that these run no more (those that ended meanwhile are ignored)."""
        return self._end(request_ids, Finish.CANCELLED)

    def fail(self, request_ids: Iterable[str] | None = None) -> TokenBatch | None:
        """The engine died (None: all of them), or refused these."""
        if request_ids is None:
            self._ended.clear()
        return self._end(list(self._runs) if request_ids is None else request_ids, Finish.ERROR)

    def _end(self, request_ids: Iterable[str], finish: Finish) -> TokenBatch | None:
        found = _Records()
        for request_id in request_ids:
            run = self._runs.get(request_id)
            if run is not None:
                found.add(run, 0, int(self._count[run.slot]), int(finish) | NO_TOKEN)
                self._close(run)
        return found.batch(self.steps)


class _Records:
    """Records that are not plain, gathered one by one."""

    def __init__(self) -> None:
        self._columns: tuple[list[int], ...] = ([], [], [], [], [])
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._prompts: dict[int, Sequence[TokenLogprobs | None]] = {}

    def add(
        self,
        run: _Run,
        token: int,
        index: int,
        flags: int,
        *,
        logprobs: TokenLogprobs | None = None,
        prompt: Sequence[TokenLogprobs | None] | None = None,
    ) -> None:
        number = len(self._columns[0])
        if logprobs is not None:
            flags |= HAS_LOGPROBS
            self._logprobs[number] = logprobs
        if prompt is not None:
            self._prompts[number] = prompt
        for column, value in zip(self._columns, (run.slot, run.generation, token, index, flags), strict=True):
            column.append(value)

    def batch(self, step: int) -> TokenBatch | None:
        if not self._columns[0]:
            return None
        slot, generation, token, index = (np.array(column, np.int32) for column in self._columns[:4])
        flags: UInt8 = np.array(self._columns[4], np.uint8)
        return TokenBatch(slot, generation, token, index, flags, step, self._logprobs, self._prompts)


def _joined(first: TokenBatch | None, second: TokenBatch | None, step: int) -> TokenBatch | None:
    """Records of `second`, then of `first` (plain ones: they have no entries whose numbers would have to move)."""
    if first is None or second is None:
        return first or second
    slot, generation, token, index, flags = (
        np.concatenate((getattr(second, name), getattr(first, name)))
        for name in ("slot", "generation", "token", "index", "flags")
    )
    return TokenBatch(slot, generation, token, index, flags, step, second.logprobs, second.prompt_logprobs)
