"""Handlers of `/v1/usage`: a key sees its own, an admin key everybody's, and without keys everybody sees all.

Running and recent exchanges are answered at once from memory; what needs the ledger is read in a thread of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from evap.accounting import Accounting
from evap.errors import EvapError, InternalError, NotFound, PermissionDenied
from evap.exchange import Exchange, State
from evap.metering import ledger
from evap.metering.accounts import Account
from evap.metering.prices import plain
from evap.metering.record import COLUMNS, Record, billable, end_of
from evap.protocol.api import usage as api
from evap.protocol.events import Reply, RequestHead
from evap.protocol.headers import JSON
from evap.siblings import NOBODY, Siblings

logger = logging.getLogger("evap.usage")
_HEADERS: Final = ((b"content-type", JSON), (b"cache-control", b"no-store"))
#: How long a query waits for records that were settled before it came.
FLUSH_S: Final = 1.0

Background = Callable[[Callable[[], Any], Callable[[Any], None]], None]


class UsagePages:
    """counts: bring a running exchange's counts up to date. background: run in a thread, then call back on the loop."""

    def __init__(
        self,
        accounting: Accounting,
        *,
        counts: Callable[[Exchange], None],
        background: Background,
        send_error: Callable[[Reply, EvapError], int],
        answered: Callable[[int], None] = lambda status: None,
        policy: str,
    ) -> None:
        self._accounting = accounting
        self._counts, self._background, self._send_error = counts, background, send_error
        self._answered = answered  # told the status of each answer
        self._policy = policy
        self.siblings: Siblings | None = None

    def one(self, reply: Reply, id: str, account: Account | None) -> None:
        """`GET /v1/usage/{id}`. Raises NotFound, also for what belongs to another key."""
        fields = self._fields(id)
        if fields is not None:
            self._answer(reply, fields, account)
        elif (others := self.siblings) is None or (maker := others.who_made(id)) == NOBODY:
            self._one_from_ledger(reply, id, account)
        else:
            others.ask("usage", id, lambda data: self._one_from_others(reply, id, account, data), maker)

    def known(self, id: str) -> bytes:
        """For another process of this server: what is known here of an exchange, or b""."""
        fields = self._fields(id)
        return msgspec.json.encode(fields) if fields is not None else b""

    def _fields(self, id: str) -> dict[str, Any] | None:
        running = self._accounting.running.get(id)
        if running is not None:
            return self._running(running)
        recent = self._accounting.recent.get(id)
        return self._record(recent) if recent is not None else None

    def _one_from_others(self, reply: Reply, id: str, account: Account | None, data: bytes) -> None:
        try:
            if data:
                self._answer(reply, msgspec.json.decode(data), account)
            else:
                self._one_from_ledger(reply, id, account)
        except EvapError as error:
            self._send_error(reply, error)

    def _one_from_ledger(self, reply: Reply, id: str, account: Account | None) -> None:
        folder = self._accounting.folder
        if folder is None:
            raise api.unknown(id)

        def read() -> bytes:
            with ledger.reading(folder) as db:
                found = ledger.find(db, id)
            if found is None or not _visible(found.key, account):
                raise api.unknown(id)
            return api.one_body(self._record(found))

        self._background(read, lambda result: self._reply(reply, result))

    def list(self, reply: Reply, head: RequestHead, account: Account | None) -> None:
        """`GET /v1/usage`. Raises InvalidRequest, PermissionDenied, NotFound."""
        query = api.parse_query(head.query)
        if account is not None and not account.key.admin:
            if query.key not in (None, account.key.id):
                raise PermissionDenied("only an admin key may see the usage of other keys", param="key")
            query = api.UsageQuery(**{f: getattr(query, f) for f in query.__struct_fields__} | {"key": account.key.id})
        if self._accounting.folder is None:
            raise NotFound("this server keeps no ledger (it was started without --data-dir)", code="no_ledger")
        if self.siblings is None:
            self._list(reply, query, 0)
        else:
            self.siblings.ask("flush", "", lambda data: self._list(reply, query, int(data or 0)))

    def _list(self, reply: Reply, query: api.UsageQuery, pending: int) -> None:
        """pending: records that other processes have not written."""
        self._background(lambda: self._read(query, pending), lambda result: self._reply(reply, result))

    # In the thread

    def _read(self, query: api.UsageQuery, others: int) -> bytes:
        accounting, recorder = self._accounting, self._accounting.recorder
        assert accounting.folder is not None
        if recorder is not None:
            recorder.flush(FLUSH_S)
        chosen = ledger.Filter(
            first_day=query.first_day, last_day=query.last_day, model=query.model, key=query.key
        )  # fmt: skip
        with ledger.reading(accounting.folder) as db:
            if query.exchanges:
                found = ledger.rows(db, chosen, after=query.after, limit=query.limit)
                last = found[-1][0] if len(found) == query.limit else None
                pending = others + (recorder.pending if recorder is not None else 0)
                return api.list_body([self._record(r) for _, r in found], pending=pending, next_after=last)
            rows = [self._sum(u, query.group_by, db) for u in ledger.sums(db, chosen, query.group_by)]
        return api.list_body(rows, pending=others + (recorder.pending if recorder is not None else 0))

    def _sum(self, usage: ledger.Usage, group_by: tuple[str, ...], db: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {name: getattr(usage, name) for name in group_by}
        if usage.day is not None:
            fields["day"] = api.day_text(usage.day)
        fields |= {name: getattr(usage, name) for name in ledger.SUMS}
        if usage.model is not None:
            fields |= self._cost(usage.model, usage.paid_prompt, usage.paid_cached, usage.billable)
        return fields

    # What is said of one exchange

    def _record(self, record: Record) -> dict[str, Any]:
        fields: dict[str, Any] = {"id": record.id, "state": "settled"}
        fields |= {name: getattr(record, name) for name in COLUMNS}
        paid = 1 if record.computed else 0
        fields |= self._energy(record.id)
        return fields | self._cost(record.model, paid * record.prompt, paid * record.cached, record.billable)

    def _energy(self, id: str) -> dict[str, int]:
        energy = self._accounting.energy
        return {"energy_mj_estimated": mj} if energy is not None and (mj := energy.of(id)) else {}

    def _running(self, exchange: Exchange) -> dict[str, Any]:
        self._counts(exchange)
        usage, ticket = exchange.usage(), exchange.account
        over = exchange.state in (State.ANSWERED, State.CANCELLED)
        return {
            "id": exchange.renderer.id, "state": "ending" if over else "running", "key": ticket.key_id,
            "operation": ticket.operation, "model": exchange.adapter or self._accounting.model, "prompt": usage.prompt,
            "cached": usage.cached, "computed": usage.computed, "emitted": usage.emitted, "delivered": usage.delivered,
            "billable": billable(self._policy, usage, exchange.end), "choices": exchange.request.n,
            "status": exchange.status, "end": end_of(exchange.ending) or None, **self._energy(exchange.renderer.id),
        }  # fmt: skip

    def _cost(self, model: str, prompt: int, cached: int, completion: int) -> dict[str, str]:
        prices = self._accounting.prices
        cost = prices.cost(model, prompt=prompt, cached=cached, completion=completion) if prices is not None else None
        return {} if prices is None or cost is None else {"cost": plain(cost), "currency": prices.currency}

    # Replies

    def _answer(self, reply: Reply, fields: dict[str, Any], account: Account | None) -> None:
        if not _visible(fields["key"], account):
            raise api.unknown(fields["id"])
        reply.whole(200, _HEADERS, api.one_body(fields))
        self._answered(200)

    def _reply(self, reply: Reply, result: bytes | Exception) -> None:
        if isinstance(result, bytes):
            reply.whole(200, _HEADERS, result)
            self._answered(200)
        elif isinstance(result, EvapError):
            self._answered(self._send_error(reply, result))
        else:
            logger.error("a usage query failed: %s", result)
            self._answered(self._send_error(reply, InternalError("the ledger could not be read")))


def _visible(key: str, account: Account | None) -> bool:
    return account is None or account.key.admin or account.key.id == key
