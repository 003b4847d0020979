"""From an engine step to bytes: rows first, then the slow path, then what has ended, then one write per connection.

Per token there is numpy only. Python runs per token on the slow path: a token without a fast fragment, stop strings,
logprobs, a reader that is behind, whole answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from evap.arrays import every, some
from evap.choice import ChoiceRun
from evap.engine.interface import Text
from evap.exchange import Exchange, Input, State
from evap.messages import FINISH_MASK, HAS_LOGPROBS, META, NO_TOKEN, SILENT, Finish, TokenBatch, TokenLogprobs
from evap.metering.counters import Counters
from evap.metering.opened import OpenTable
from evap.metrics import Live
from evap.protocol.events import Reply
from evap.protocol.rows import RowTable
from evap.slots import SlotTable

BoolArray = npt.NDArray[np.bool_]
NOT_A_ROW: Final = NO_TOKEN | SILENT | META | HAS_LOGPROBS


class Steps:
    """The slot table's running choices, fed by token batches.

    cancel: tells the engine to stop a (slot, generation). flush: writes what every connection has to write, now.
    settled: is given each exchange once, at its end; those that end together, together. enter: called before tokens are
    taken, so that whoever may have some is known to a successor.
    """

    def __init__(
        self,
        *,
        text: Text,
        rows: RowTable,
        cancel: Callable[[int, int], None],
        flush: Callable[[], None],
        now_ns: Callable[[], int],
        settled: Callable[[Sequence[Exchange]], None],
        table: OpenTable | None = None,
        live: Live | None = None,
        pages: Counters | None = None,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        self.slots: SlotTable[ChoiceRun] = SlotTable(rows.max_slots)
        self.rows = rows
        self._cancel = cancel
        self._flush = flush
        self._now_ns = now_ns
        self._settled = settled
        self._text = text
        #: int32: tokens that have come from the engine, by slot
        self._computed = table.computed if table is not None else np.zeros(rows.max_slots, np.int32)
        self._live = live or Live(rows.max_slots)
        self._at_ns = 0  # when the last tokens came
        #: batches so far: an engine with work for which this stands still hangs
        self.batches = 0
        self._table, self._pages, self._enter = table, pages, enter
        #: called at the end of a batch in which the engine has given slots back
        self.freed: Callable[[], None] | None = None
        self._given_back = False
        self._slowed: list[ChoiceRun] = []
        self._left: list[ChoiceRun] = []
        #: which slots take token ids instead of text
        self._raw: BoolArray = np.zeros(rows.max_slots, np.bool_)
        self._raw_count = 0
        self._to_rows: dict[ChoiceRun, None] = {}
        self._ended: dict[Exchange, None] = {}
        self._fast: BoolArray = np.zeros(0, np.bool_)
        #: what rows are made of: texts, and ids as octets
        self._tables: tuple[npt.NDArray[np.void], npt.NDArray[np.void]]
        self.grow(text.vocab_size)

    def grow(self, vocab_size: int) -> None:
        """Engines pad their vocabulary; ids beyond the tokenizer's are never fast, and never out of a table."""
        size = max(vocab_size, self._text.vocab_size)
        fragments = self._text.fragments
        fields = np.zeros(size, f"V{fragments.width if fragments is not None else 1}")
        self._fast = np.zeros(size, np.bool_)
        if fragments is not None:
            fields[: len(fragments.text)] = fragments.text
            self._fast[: len(fragments.fast)] = fragments.fast
        self._tables = fields, np.arange(size, dtype="<u4").view("V4")

    # Choices come and go

    def add(self, exchange: Exchange, index: int) -> ChoiceRun:
        """Give a choice its slot. Raises IndexError when there is none; admission asks first."""
        choice = ChoiceRun(exchange, index)
        choice.slot, choice.generation = self.slots.take(choice)
        self._computed[choice.slot] = 0
        self._live.gaps.begin(choice.slot)
        self.rows.forget(choice.slot)
        if exchange.kind == "tokens":
            self._raw[choice.slot] = True
            self._raw_count += 1
        return choice

    def want_rows(self, choice: ChoiceRun) -> None:
        """Put the choice on rows before the next step, if its stream has nothing buffered by then."""
        if choice.row is not None:
            self._to_rows[choice] = None

    def cancel(self, exchange: Exchange, reason: str) -> None:
        """The client no longer wants it: the engine hears at once."""
        self.abandon(exchange)
        exchange.cancel(reason)

    def lose(self, exchange: Exchange, reply: Reply, reason: str) -> None:
        """The client does not want one of its pushes: that choice is to stop, the others go on."""
        if exchange.state not in (State.RUNNING, State.ANSWERED):
            return
        self.counts(exchange)
        for choice in exchange.lose(reply, reason):
            self._stop(choice)
        if exchange.state is not State.RUNNING:
            self.abandon(exchange)

    def abandon(self, exchange: Exchange) -> None:
        """The answer is complete or failed: whatever the engine still does for it is to stop."""
        for choice in exchange.choices:
            if not choice.released:
                self._stop(choice)
        self._ended[exchange] = None

    def _stop(self, choice: ChoiceRun) -> None:
        self._sync(choice)
        self.rows.leave(choice.slot)
        self._cancel(choice.slot, choice.generation)

    def counts(self, exchange: Exchange) -> None:
        """Bring a running exchange's counts up to date."""
        for choice in exchange.choices:
            self._sync(choice)
            if not choice.released and self._pages is not None:
                row = self._pages.row(choice.slot, choice.generation)
                choice.computed = max(choice.given, row.computed if row is not None else 0)

    def _sync(self, choice: ChoiceRun) -> None:
        if not choice.released:
            choice.given = int(self._computed[choice.slot])
            choice.computed = max(choice.computed, choice.given)
            choice.row_delivered = self.rows.delivered(choice.slot)

    def _release(self, choice: ChoiceRun) -> None:
        """The engine has confirmed the end: the slot may be used again."""
        choice.released = self._given_back = True
        if self._raw[choice.slot]:
            self._raw[choice.slot] = False
            self._raw_count -= 1
        self.slots.give_back(choice.slot)
        self._to_rows.pop(choice, None)
        exchange = choice.exchange
        if exchange.unended:
            exchange.complete()
        if self._table is not None:
            self._left.append(choice)
        if exchange.state is not State.RUNNING:
            self._ended[exchange] = None

    # A step

    def on_batch(self, batch: TokenBatch) -> None:
        """Records of one engine step, or several."""
        self._enter()
        self.batches += 1
        if self._to_rows:
            self._join_rows()
        fresh = self.slots.fresh(batch.slot, batch.generation)
        if fresh is not None:
            batch = batch.select(fresh)
        if not batch.steady and batch.flags.any():
            self._flagged(batch)
        else:
            self._take(batch, batch.slot, batch.token)
        self._flush()
        if self._slowed:
            self._note_lag()
        if self._ended:
            self.settle_ended()
        if self._left:
            self._keep_counts()
        if self._given_back:
            self._given_back = False
            if self.freed is not None:
                self.freed()

    def _keep_counts(self) -> None:
        """Slots that were given back may be used again from here on; what is not settled keeps its counts."""
        assert self._table is not None
        for choice in self._left:
            account = choice.exchange.account
            if account.record is None and account.entry >= 0:
                emitted = choice.emitted if choice.ended else choice.given
                out = min(emitted, choice.exchange.delivered(choice))
                self._table.released(account.entry, choice.slot, choice.computed, emitted, out)
        self._left.clear()

    def _note_lag(self) -> None:
        """Where tokens took the slow path, some may not be delivered yet: a successor of a killed process must know."""
        assert self._table is not None
        for choice in self._slowed:
            if not choice.released:
                out = choice.exchange.delivered(choice)
                self._table.lag[choice.slot] = choice.given - out
        self._slowed.clear()

    def _join_rows(self) -> None:
        for choice in list(self._to_rows):
            detokenizer = choice.detokenizer
            if choice.ended or choice.released or choice.exchange.state is not State.RUNNING:
                del self._to_rows[choice]
            elif detokenizer is not None and detokenizer.holding:
                del self._to_rows[choice]  # its next slow token brings it back
            elif choice.slot in self.rows or (choice.row is not None and self._join(choice, choice.row)):
                del self._to_rows[choice]
                if self._table is not None:
                    self._table.lag[choice.slot] = 0  # a stream that may be on rows has nothing left to send

    def _join(self, choice: ChoiceRun, row: tuple[bytes, bytes]) -> bool:
        table = int(self._raw[choice.slot])
        return self.rows.join(choice.slot, choice.outlet.reply, *row, self._tables[table].itemsize, table)

    def _take(self, batch: TokenBatch, slots: Any, tokens: Any) -> None:
        """Records with a token each; slots and tokens: of those that are nothing else. Rows are on their way before
        anything is noted that nobody waits for."""
        self._at_ns = self._now_ns()
        self._computed[batch.slot] = batch.index + 1
        ok = self._fast[tokens]
        if self._raw_count:
            ok |= self._raw[slots]  # a token's id needs no text
        written = self.rows.push(slots, tokens, self._tables, ok) if len(slots) else ok
        self._note(batch)
        if not every(written):
            slow = ~written
            self._slow(slots[slow].tolist(), tokens[slow].tolist())

    def _note(self, batch: TokenBatch) -> None:
        """How many, when, and which exchanges have their first."""
        now_ns, live = self._at_ns, self._live
        for slot in () if batch.steady else batch.slot[np.flatnonzero(batch.index == 0)].tolist():
            choice = self.slots.owner[slot]
            if choice is not None and not choice.exchange.first_ns:
                exchange = choice.exchange
                exchange.first_ns = now_ns
                exchange.account.first_step = batch.step
                live.started(len(exchange.prompt_ids), exchange.cached, (now_ns - exchange.opened_ns) / 1e9)
        live.counts["generated"] += len(batch.slot)
        live.gaps.note(batch.slot, now_ns)

    def _slow(
        self, slots: Sequence[int], tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> None:
        """One call per choice with all its tokens of the step, in order."""
        runs: dict[int, list[int]] = {}
        for number, slot in enumerate(slots):
            runs.setdefault(slot, []).append(number)
        for slot, numbers in runs.items():
            choice = self.slots.owner[slot]
            if choice is None:
                continue
            self._sync(choice)
            choice.exchange.last_ns = self._at_ns
            entries = [logprobs[i] for i in numbers] if logprobs is not None else None
            choice.exchange.take(choice, [tokens[i] for i in numbers], entries)
            if self._table is not None and choice.exchange.request.stream:
                self._slowed.append(choice)
            if choice.ended:
                self._after_end(choice)
            elif choice.row is not None:
                self._to_rows[choice] = None

    def _flagged(self, batch: TokenBatch) -> None:
        flags = batch.flags
        for i in np.flatnonzero(flags & META).tolist():
            choice = self.slots.owner[int(batch.slot[i])]
            if choice is not None:
                choice.exchange.cached = max(choice.exchange.cached, int(batch.token[i]))
                if i in batch.prompt_logprobs:
                    choice.exchange.take_prompt(choice, batch.prompt_logprobs[i])
                if self._table is not None:
                    self._table.cached[choice.slot] = choice.exchange.cached
        counted = (flags & NO_TOKEN) == 0
        if some(counted):
            plain = (flags & NOT_A_ROW) == 0
            self._take(batch.select(counted), batch.slot[plain], batch.token[plain])
        special = np.flatnonzero((flags & (NO_TOKEN | SILENT | HAS_LOGPROBS)) == HAS_LOGPROBS)
        if len(special):
            entries = [batch.logprobs[i] for i in special.tolist()]
            self._slow(batch.slot[special].tolist(), batch.token[special].tolist(), entries)
        for i in np.flatnonzero(flags & FINISH_MASK).tolist():
            last = None if flags[i] & NO_TOKEN else int(batch.token[i])
            self._final(int(batch.slot[i]), Finish(int(flags[i] & FINISH_MASK)), last, batch.step)

    def _final(self, slot: int, finish: Finish, last_token: int | None, step: int) -> None:
        choice = self.slots.owner[slot]
        if choice is None:
            return
        self._sync(choice)
        self.rows.leave(slot)
        exchange = choice.exchange
        running = exchange.state is State.RUNNING
        exchange.last_ns = self._at_ns if running else exchange.last_ns
        counted = self._pages.final(slot, choice.generation, choice.given, finish) if self._pages is not None else None
        if counted is not None:
            choice.computed = counted.computed
            exchange.account.take(*counted[1:])
        elif exchange.first_ns:
            exchange.account.take(step - exchange.account.first_step + 1, 0, self._now_ns())
        choice.final = True
        exchange.finish(choice, finish, last_token)
        self._release(choice)
        if running and exchange.state is not State.RUNNING:
            self.abandon(exchange)

    def _after_end(self, choice: ChoiceRun) -> None:
        """A choice has its finish_reason (or the whole exchange failed): stop what still runs for it."""
        exchange = choice.exchange
        if exchange.state is not State.RUNNING:
            self.abandon(exchange)
        elif not choice.released:
            self._stop(choice)

    # Settling

    def settle_ended(self) -> None:
        """Settle what has ended and whose bytes are gone. Cheap; called after every flush that may have ended one."""
        if over := [exchange for exchange in self._ended if exchange.finished]:
            for exchange in over:
                del self._ended[exchange]
                exchange.move(Input.SETTLE)
            self._settled(over)
