"""Who may ask for what, and what each exchange used: joins exchanges with keys, budgets, the ledger and its files.

Called from the loop's thread, once or twice for each exchange and never for a token; what may block (`open`, `close`,
`look_up`, and the queries of `usage.py`) is called from other threads. One account, one record: the answer's usage, the
trailers, `/metrics`, the limits and the ledger all come from the `Usage` that an exchange is settled with.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from evap.config import MeterConfig
from evap.errors import EvapError, Overloaded, PermissionDenied, StartupError, Unauthenticated
from evap.exchange import Exchange
from evap.messages import SamplingParams
from evap.metering import accounts, keys, ledger, opened, operations, prices, readings, recorder, recovery, survivors
from evap.metering.accounts import Account, Ticket
from evap.metering.counters import Counters
from evap.metering.energy import Energy, open_energy
from evap.metering.record import Record, billable, charged, end_of, used_up
from evap.metering.shared_operations import SharedBooks
from evap.metering.sink import Sink
from evap.protocol.events import RequestHead
from evap.protocol.headers import limit_headers

logger = logging.getLogger("evap.accounting")
RECENT: Final = 10_000
MAX_MODEL_BYTES: Final = 256
#: Exchanges that may be open or on their way into the ledger, at least.
MIN_ENTRIES: Final = 8192


class Accounting:
    """All accounts of a process. `open` before the first request, `close` after the last."""

    def __init__(
        self, config: MeterConfig, *, model: str, slots: int, now_ns: Callable[[], int], wall_ns: Callable[[], int],
        shared: SharedBooks | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self.model = model if len(model.encode()) <= MAX_MODEL_BYTES else model[: MAX_MODEL_BYTES // 4]
        self._slots = slots
        self._by_delivery = config.billable == "delivered"
        self._now_ns, self._wall_ns = now_ns, wall_ns
        self._wall_offset_ns = wall_ns() - now_ns()  # the wall clock may be set: `tick` looks at it again
        self._shared = shared
        self._operations = operations.Operations() if shared is None else shared.operations
        self._rules: accounts.Rules = accounts if shared is None else shared.accounts
        self._keys: keys.KeyRing | None = None
        self._accounts: dict[str, Account] = {}
        self._lock: int | None = None
        self.folder = Path(config.data_dir) if config.data_dir else None
        self.prices: prices.Prices | None = None
        self.recorder: recorder.Recorder | None = None
        self.table: opened.OpenTable | None = None
        self.energy: Energy | None = None  #: where there is NVML
        self.pages: Counters | None = None  #: of engines in processes of their own
        self.sink: Sink | None = None
        self.sink_behind = ""  #: why, if another process feeds it
        self.running: dict[str, Exchange] = {}
        self._fresh: list[Exchange] = []  # that are to be entered into the table in this pass of the loop
        self._order: deque[str] = deque()
        self.recent: dict[str, Record] = {}  #: the last ones, whether they are in the ledger yet or not

    # Start and end

    def open(self) -> None:
        """Read keys and prices, open the ledger, settle what a killed process left. Raises StartupError."""
        config = self._config
        accounts.self_test()
        if config.api_keys:
            self._take_keys(keys.read(Path(config.api_keys)))
        if config.prices:
            self.prices = prices.read(Path(config.prices))
        if self.folder is None:
            if config.usage_sink and self._shared is None:
                raise StartupError("--usage-sink copies the ledger, and there is none", remedy="add --data-dir DIR")
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._shared is None:
                self._lock = recovery.take_lock(self.folder)
            self._open_files(self.folder)
        except OSError as error:
            raise StartupError(
                f"--data-dir {self.folder} cannot be used: {error.strerror}", remedy="a directory of ours, with space"
            ) from error
        if config.usage_sink and self._shared is None:
            self.sink = Sink(config.usage_sink, self.folder)
            self.sink.start()

    def _open_files(self, folder: Path) -> None:
        db = ledger.open_ledger(folder)
        place = self._shared
        own = recovery.files(folder, place.number if place is not None else None)
        if place is None:
            recovery.recover(
                db, folder, recovery.all_files(folder), policy=self._config.billable, wall_ns=self._wall_ns()
            )
            for used in ledger.last_operations(db, operations.REMEMBERED + 1):
                self._operations.remember(*used)
            recovery.load_used(db, self._accounts, self._wall_ns() // 1_000_000_000)
        self.table = opened.OpenTable(own.table, self._slots, max(MIN_ENTRIES, 4 * self._slots))
        turn = folder / recovery.TURN if place is not None else None
        self.recorder = recorder.Recorder(
            db, self.table, own.spool, on_state=_say_state, turn=turn, now_ns=self._now_ns
        )  # fmt: skip
        self.recorder.start()

    def meter(self, engines: int, *, ahead: bool, gpu: bool) -> list[dict[str, str]]:
        """Make a counters page for each engine; what each is told. After `open`. Raises StartupError."""
        self.energy = open_energy() if gpu else None
        try:
            prefix = recovery.pages(self._shared.number if self._shared is not None else None)
            self.pages = Counters(
                self._slots,
                engines,
                self.folder,
                ahead=ahead,
                now_ns=self._now_ns(),
                unix_ns=self._wall_ns(),
                prefix=prefix,
            )
        except OSError as error:
            raise StartupError(f"no memory for the engines' counters: {error.strerror}") from error
        return self.pages.specs

    def close(self) -> None:
        """Write what is settled. Blocks for as long as that takes, at most some seconds."""
        if self.recorder is not None and not self.recorder.close():
            logger.warning("the ledger did not take %d records; the next start does", self.recorder.pending)
        for part in (self.sink, self.energy):
            if part is not None:
                part.stop()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # Keys

    def reload(self) -> None:
        """Read the key file again. What is wrong with it is logged, and the keys stay as they were."""
        if not self._config.api_keys:
            return
        try:
            self._take_keys(ring := keys.read(Path(self._config.api_keys)))
        except StartupError as error:
            logger.error("the keys stay as they are: %s", error.message)
        else:
            logger.info("%d keys read from %s", len(ring.keys), self._config.api_keys)

    def _take_keys(self, ring: keys.KeyRing) -> None:
        now_ns, wall_s = self._now_ns(), self._wall_ns() // 1_000_000_000
        if self._shared is not None:
            self._shared.accounts.check_room(ring.keys)
        for id, key in ring.keys.items():
            known = self._accounts.setdefault(id, Account(key, now_ns=now_ns, wall_s=wall_s))
            if self._shared is None:
                known.change(key, now_ns)
            else:
                self._shared.accounts.enter(known)
                self._shared.accounts.change(known, key, now_ns)
        self._keys = ring  # accounts of keys that are gone stay: their exchanges may run, and they may come back

    def authenticate(self, head: RequestHead) -> Account | None:
        """Whose request it is; None when there are no keys. Raises Unauthenticated.

        Found once for a head that is asked about before its body and with it, or that comes again on a connection, as
        long as the keys are the same: a key that was revoked while a body was uploaded is of no use any more.
        """
        keys = self._keys
        if keys is None:
            return None
        if head.known and head.known[0] is keys:
            account: Account = head.known[1]
            return account
        scheme, _, secret = (head.get(b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not secret:
            raise Unauthenticated("an API key is needed: send Authorization: Bearer KEY", code="missing_api_key")
        key = keys.check(secret.strip(b" "))
        if key is None:
            raise Unauthenticated("this API key is not known here")
        account = self._accounts[key.id]
        head.known[:] = keys, account
        return account

    # One exchange, in order

    def admit(self, account: Account | None, head: RequestHead, id: str, adapter: str = "") -> Ticket:
        """Its rate, its stream, its operation. Raises EvapError, and nothing is held then. adapter: a model's name."""
        if self.recorder is not None and not self.recorder.accepting:
            raise Overloaded("usage cannot be recorded at the moment", code="ledger_unavailable", retry_after_s=5)
        header = head.get(b"idempotency-key")
        ticket = Ticket(account, operations.read(header) if header is not None else "")
        if account is not None and not account.key.may_use(adapter or self.model):
            raise PermissionDenied(f"key '{account.key.id}' may not use this model", param="model", code="model_denied")
        if ticket.operation:
            self._operations.begin(ticket.key_id, ticket.operation, id)
            ticket.lookup = self._operations.forgot
        if account is not None:
            try:
                self._rules.admit(account, self._now_ns(), self._wall_ns() // 1_000_000_000)
            except EvapError:
                if ticket.operation:
                    self._operations.end(ticket.key_id, ticket.operation, id, used_up=False)
                raise
        return ticket

    def look_up(self, ticket: Ticket) -> None:
        """Ask the ledger about an operation that may be older than what is remembered. Raises Conflict. May block."""
        if ticket.lookup and self.folder is not None:
            with ledger.reading(self.folder) as db:
                used = ledger.find_operation(db, ticket.key_id, ticket.operation)
            if used is not None:
                raise operations.conflict(used, running=False)

    def reserve(self, exchange: Exchange, sampling: SamplingParams, prompt: int) -> SamplingParams:
        """`sampling` with what the budgets leave. Raises RateLimited, QuotaExceeded, or Overloaded."""
        ticket = exchange.account
        if self.table is not None and self.table.full:
            raise Overloaded(
                "too many answers wait for their readers or for the ledger; try again later", retry_after_s=1
            )
        if ticket.account is None:
            return sampling
        request = exchange.request
        most = self._rules.reserve(
            ticket, prompt=prompt, n=request.n, asked=request.max_tokens, room=sampling.max_tokens,
            now_ns=self._now_ns(), wall_s=self._wall_ns() // 1_000_000_000,
        )  # fmt: skip
        exchange.headers = (*exchange.headers, *limit_headers(self._rules.limits(ticket.account, self._now_ns())))
        if not ticket.capped:
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))

    def opened(self, exchange: Exchange, soon: Callable[[Callable[[], None]], object]) -> None:
        """It has got its slots, and the engine hears of it next. Those of one pass of the loop are entered together."""
        if self.table is not None:
            if not self._fresh:
                soon(self.enter)
            self._fresh.append(exchange)

    def enter(self) -> None:
        """Enter what is new into the table: in this pass of the loop, and before any token of it is taken."""
        if (table := self.table) is None or not self._fresh:
            return
        exchanges, self._fresh = self._fresh, []
        wall, paged = self._wall_offset_ns, self.pages is not None
        for exchange in exchanges:
            ticket, request, choices = exchange.account, exchange.request, exchange.choices
            if ticket.record is not None:
                continue  # it was over at once
            note = survivors.note((
                exchange.renderer.id, ticket.key_id, ticket.operation, exchange.adapter or self.model,
                (exchange.opened_ns + wall) // 1000, len(exchange.prompt_ids), request.n,
            ))  # fmt: skip
            slots = (choices[0].slot,) if len(choices) == 1 else [choice.slot for choice in choices]
            generations = [choice.generation for choice in choices] if paged else ()
            ticket.entry = table.open(note, slots, whole=not request.stream, generations=generations)

    def settle(self, exchanges: Sequence[Exchange], now_ns: int) -> None:
        """They are over: the one record of each. Once per exchange; one loop after the other, which is cheaper."""
        records = [self._settle(exchange, now_ns) for exchange in exchanges]
        if (recorder := self.recorder) is not None and (table := self.table) is not None:
            entries = [exchange.account.entry for exchange in exchanges]
            table.settle(entries, records)
            recorder.put(records, entries)
        if self.energy is not None:
            self.energy.settled(records)
        for record in records:
            self._keep(record)
            self.running.pop(record.id, None)

    def _settle(self, exchange: Exchange, now_ns: int) -> Record:
        ticket, usage, wall = exchange.account, exchange.usage(), self._wall_offset_ns
        end = end_of(exchange.ending)
        bill = usage.delivered if self._by_delivery else billable(self._config.billable, usage, end)
        id, operation = exchange.renderer.id, ticket.operation
        if operation:
            kept = used_up(operation, end=end, delivered=usage.delivered, submitted=bool(exchange.choices))
            self._operations.end(ticket.key_id, operation, id, used_up=bool(kept))
            operation = kept
        if ticket.account is not None:
            self._rules.settle(ticket, charged(usage, bill))
        first_ns = ticket.first_ns or exchange.first_ns
        ticket.usage = usage
        ticket.record = Record(
            id, ticket.key_id, operation, exchange.adapter or self.model, (exchange.opened_ns + wall) // 1000,
            (first_ns + wall) // 1000 if first_ns else 0,
            (ticket.last_ns + wall) // 1000 if first_ns and ticket.last_ns else 0, (now_ns + wall) // 1000,
            usage.prompt, usage.cached, usage.computed, usage.emitted, usage.delivered, bill, ticket.steps,
            exchange.request.n, exchange.status, end,
        )  # fmt: skip
        return ticket.record

    def _keep(self, record: Record) -> None:
        # Beside the dictionary, whose first entry is found by walking over all that were deleted before it.
        self.recent[record.id] = record
        self._order.append(record.id)
        if len(self._order) > RECENT:
            self.recent.pop(self._order.popleft(), None)

    def tick(self, open_exchanges: Sequence[Exchange]) -> None:
        """About once a second: what answers without slots have delivered by now, to slow readers; late counts."""
        self._wall_offset_ns = self._wall_ns() - self._now_ns()
        if self.pages is not None:
            self.pages.look_again()
        if self.energy is not None:
            self.energy.tick(self._now_ns(), ((e.renderer.id, e.usage()) for e in open_exchanges))
        if self.table is not None:
            for exchange in open_exchanges:
                if exchange.account.entry >= 0 and all(c.released for c in exchange.choices):
                    self.table.delivered(exchange.account.entry, exchange.usage().delivered)

    # What others may know

    def gauges(self) -> readings.Readings:
        return readings.gauges(self.recorder, lambda: self._behind)

    def counters(self) -> readings.Readings:
        return readings.counters(self.recorder, self.sink, self.pages, self.energy)

    @property
    def _behind(self) -> str:
        return self.sink.error if self.sink is not None else self.sink_behind

    @property
    def trouble(self) -> str:
        """Empty, or what is wrong with the ledger, for /ready."""
        if self.recorder is not None and (trouble := self.recorder.trouble):
            return f"ledger {trouble}"
        return f"usage sink: {self._behind}" if self._behind else ""


def _say_state(state: recorder.State, detail: str) -> None:
    if state is recorder.State.OK:
        logger.info("the ledger is written again")
    else:
        logger.error("the ledger cannot be written (%s): %s", state.value, detail)
