"""Which tokens the next step computes. Pure Python: no torch, no clock, no I/O.

Rules:
- Requests are served in the order of `rank`: arrival number + OVERTAKE per level of priority. So a request of lower
  priority is overtaken by a bounded number of others, and none starves.
- A request is admitted with all the blocks of its prompt, so that a prefill never has to stop half-way. The first one
  that does not fit holds up those behind it.
- A request whose next block a running one is about to compute waits for it: n choices compute their prompt once.
- A step computes one token of every decoding request and fills the rest of its cost budget with prefill.
- When a decoding request needs a block and none is free, the running request of the highest rank is preempted: its
  blocks are released, and it waits again under its old rank. Its tokens so far are kept and recomputed as a prompt.
  The lowest rank is never preempted, and a single request always fits: so there is always progress.
- A request leaves in one way only: `end`, which `commit` calls for those whose last token it takes in.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evap.engine.torch.cache import BlockPool, chain_hash, root_hash
from evap.messages import Finish, GenerateRequest

#: Places in the queue that one level of priority is worth.
OVERTAKE = 8
#: Levels beyond this are as good as this.
MAX_PRIORITY = 128
#: A prefill chunk is never cut below this many tokens by its cost.
MIN_CHUNK = 16


@dataclass(slots=True, eq=False)
class Seq:
    """A request in the engine. `tokens` is the prompt and what was generated; `computed` of them are in the cache."""

    slot: int
    generation: int
    request: GenerateRequest
    rank: int
    tokens: list[int]
    prompt_len: int
    stop_ids: frozenset[int]
    parent: bytes
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    published: int = 0  # blocks that the pool knows by hash
    awaits: bytes = b""  # hash of the first block that was not cached when it was last looked at
    cached: int = -1  # prompt tokens found in the cache at the first admission; -1 before that

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens[start : start + count] of a sequence; sample the next token if `last`."""

    seq: Seq
    start: int
    count: int
    last: bool


class Scheduler:
    """Waiting and running sequences over one pool of blocks.

    max_running: sequences with blocks. budget: cost of a step in tokens; a token at position p costs
    1 + p / cost_context (attention grows with the context). max_len: tokens of a sequence, at most what the pool holds.
    variant: (prompt length, position) -> what the rotation of that position depends on besides the position.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        budget: int,
        max_len: int,
        cost_context: int = 1 << 40,
        variant: Callable[[int, int], int] = lambda prompt_len, position: 0,
    ) -> None:
        if max_len > pool.count * pool.block_size:
            raise ValueError("a single sequence must fit the pool")
        self.pool = pool
        self.max_running = max_running
        self.budget = budget
        self.max_len = max_len
        self.cost_context = cost_context
        self._variant = variant
        #: Of the last step that was scheduled.
        self.cost = 0.0
        self._arrivals = 0
        self.waiting: list[Seq] = []  # by rank
        self.running: list[Seq] = []  # by rank

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, slot: int, generation: int, request: GenerateRequest, eos_ids: frozenset[int]) -> Seq:
        """Queue a request. Its prompt leaves room for one token at least (ValueError)."""
        tokens = list(request.prompt_ids)
        if not 0 < len(tokens) < self.max_len:
            raise ValueError(f"a prompt of {len(tokens)} tokens does not fit a context of {self.max_len}")
        stop = frozenset(request.sampling.stop_token_ids)
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, request.priority))
        seq = Seq(
            slot,
            generation,
            request,
            self._arrivals + OVERTAKE * priority,
            tokens,
            len(tokens),
            stop if request.sampling.ignore_eos else stop | eos_ids,
            root_hash(f"{request.cache_salt}\0{request.adapter}"),
        )
        self._arrivals += 1
        bisect.insort(self.waiting, seq, key=_rank)
        return seq

    def end(self, seq: Seq) -> None:
        """Take a sequence out, between steps: finished, cancelled, failed. It must be waiting or running."""
        if seq.blocks:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)

    def schedule(self) -> tuple[list[Work], list[Seq]]:
        """The work of the next step (empty only if idle), and who was admitted for the first time."""
        work: list[Work] = []
        left = float(self.budget)
        for seq in list(self.running):
            # No blocks: preempted by a lower rank in this loop, so before its own turn.
            if seq.blocks and len(seq.tokens) - seq.computed == 1 and self._grow(seq):
                work.append(Work(seq, seq.computed, 1, last=True))
                left -= self._cost(seq.computed)
        left = max(left, MIN_CHUNK)  # decoding alone may not starve a prefill
        for seq in self.running:
            if len(seq.tokens) - seq.computed > 1 and left > 0:
                left = self._prefill(seq, left, work)
        admitted, left = self._admissions(left, work)
        self.cost = self.budget - left
        return work, admitted

    def _admissions(self, left: float, work: list[Work]) -> tuple[list[Seq], float]:
        """Start waiting sequences while budget and room last. Returns those that are new, and the budget left."""
        admitted: list[Seq] = []
        coming = {_coming(seq) for seq in self.running} - {b""}
        for seq in list(self.waiting):
            if left <= 0 or len(self.running) >= self.max_running:
                break
            if seq.awaits in coming:
                continue
            known = self._known(seq)
            seq.awaits = seq.hashes[len(known)] if len(known) < len(seq.hashes) else b""
            if seq.awaits in coming:
                continue
            if not self._admit(seq, known):
                break
            coming |= {_coming(seq)} - {b""}
            if seq.cached < 0:
                seq.cached = seq.computed
                admitted.append(seq)
            left = self._prefill(seq, left, work)
        return admitted, left

    def commit(self, work: Sequence[Work], sampled: Sequence[int]) -> list[Finish]:
        """Take in a step's result: `sampled` has a token for each work item with `last` (the others are ignored).

        Returns how each item's sequence stands: NONE, or why it ended with this token (it is then gone).
        """
        finishes: list[Finish] = []
        for item, token in zip(work, sampled, strict=True):
            seq = item.seq
            seq.computed = item.start + item.count
            self._publish(seq)
            finish = Finish.NONE
            if item.last:
                seq.tokens.append(token)
                finish = self._judge(seq, token)
                if finish is not Finish.NONE:
                    self.end(seq)
            finishes.append(finish)
        return finishes

    def _judge(self, seq: Seq, token: int) -> Finish:
        sampling = seq.request.sampling
        if token in seq.stop_ids and seq.generated > sampling.min_tokens:
            return Finish.STOP
        if seq.generated >= sampling.max_tokens or len(seq.tokens) >= self.max_len:
            return Finish.LENGTH
        return Finish.NONE

    def _cost(self, position: int) -> float:
        return 1 + position / self.cost_context

    def _prefill(self, seq: Seq, left: float, work: list[Work]) -> float:
        """Add the next chunk of a prefill, as far as the budget goes; returns what is left of it."""
        missing = len(seq.tokens) - seq.computed
        cost = self._cost(seq.computed)
        # The floor keeps a step useful at long contexts; what little others left is not overdrawn that far.
        count = min(missing, max(MIN_CHUNK if left >= MIN_CHUNK else 1, math.ceil(left / cost)))
        work.append(Work(seq, seq.computed, count, last=count == missing))
        return left - count * cost

    def _known(self, seq: Seq) -> list[int]:
        """Cached blocks of its beginning. Without the last token: the next sample is drawn from that one's output."""
        return self.pool.lookup(self._hashes(seq, (len(seq.tokens) - 1) // self.pool.block_size))

    def _admit(self, seq: Seq, known: list[int]) -> bool:
        """Give a waiting sequence its blocks, `known` ones first, if there are enough."""
        size = self.pool.block_size
        need = -(-len(seq.tokens) // size) - len(known)
        # One block is left for each that runs, or it would soon preempt the newcomer.
        if need + self.pool.idle(known) + len(self.running) > self.pool.free:
            return False
        self.pool.hold(known)
        seq.blocks = known + self.pool.allocate(need, known[-1] if known else -1)
        seq.computed = len(known) * size
        seq.published = len(known)
        self.waiting.remove(seq)
        bisect.insort(self.running, seq, key=_rank)
        return True

    def _grow(self, seq: Seq) -> bool:
        """Give `seq` room for one more token, at the expense of higher ranks. False: it was preempted itself."""
        if seq.computed < len(seq.blocks) * self.pool.block_size:
            return True
        while self.pool.free == 0:
            victim = self.running.pop()
            self._release(victim)
            bisect.insort(self.waiting, victim, key=_rank)
            if victim is seq:
                return False
        seq.blocks += self.pool.allocate(1, seq.blocks[-1])
        return True

    def _release(self, seq: Seq) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = seq.published = 0

    def _hashes(self, seq: Seq, count: int) -> list[bytes]:
        """The hashes of the first `count` blocks of a sequence."""
        size = self.pool.block_size
        while len(seq.hashes) < count:
            start = len(seq.hashes) * size
            parent = seq.hashes[-1] if seq.hashes else seq.parent
            # The variant never falls along a sequence: if it is the same at both ends, it is so between them.
            variant = self._variant(seq.prompt_len, start) << 32 | self._variant(seq.prompt_len, start + size - 1)
            seq.hashes.append(chain_hash(parent, seq.tokens[start : start + size], variant))
        return seq.hashes[:count]

    def _publish(self, seq: Seq) -> None:
        full = seq.computed // self.pool.block_size
        for place in range(seq.published, full):
            self.pool.publish(seq.blocks[place], self._hashes(seq, full)[place])
        seq.published = full


def _coming(seq: Seq) -> bytes:
    """The hash of the next block that a prefill completes, or b""."""
    return seq.hashes[seq.published] if seq.published < len(seq.hashes) else b""


def _rank(seq: Seq) -> int:
    return seq.rank
