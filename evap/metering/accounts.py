"""What keys may do: rates, concurrent streams, token budgets. Integers only; clocks are passed in.

A request is admitted (its rate, its stream), then reserves the tokens it may use at most, then is settled with what it
did use. Two kinds of limits:

- A budget (per day or month, UTC) is never overrun: a reservation is at most what is left, and the engine is given no
  more tokens than were reserved, so a stream whose budget runs out ends there by itself.
- A rate (tokens per minute) admits a request when what it asks for fits, or the bucket is full. A request that names no
  limit of its own reserves all there is; if it used more, the bucket is in debt and the next one waits. So whatever
  happens, the rate is overshot by one reservation at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Final, Protocol

import msgspec

from evap.errors import Limit, QuotaExceeded, RateLimited, StartupError
from evap.messages import Usage
from evap.metering.record import Record

MINUTE_NS: Final = 60_000_000_000


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may do, in the key file and in memory. 0: no limit. priority: lower is sooner, before all that a
    request says. most_urgent: the lowest urgency (RFC 9218) that its requests may claim."""

    models: tuple[str, ...] = ("*",)
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_streams: int = 0
    tokens_per_day: int = 0
    tokens_per_month: int = 0
    priority: int = 0
    most_urgent: Annotated[int, msgspec.Meta(ge=0, le=7)] = 0
    admin: bool = False


class Key(Rights, frozen=True, kw_only=True):
    """One key. hash: SHA-256 of the secret."""

    id: str
    hash: bytes

    def may_use(self, model: str) -> bool:
        return "*" in self.models or model in self.models


class Bucket:
    """`limit` units a minute, all of which may be taken at once; may go into debt. Exact: integers only."""

    __slots__ = ("level", "limit", "then_ns")

    def __init__(self, limit: int, now_ns: int) -> None:
        self.set(limit, limit * MINUTE_NS, now_ns)

    def set(self, limit: int, level: int, then_ns: int) -> None:
        """level: units times MINUTE_NS, as of then_ns."""
        self.limit, self.level, self.then_ns = limit, level, then_ns

    def available(self, now_ns: int) -> int:
        passed = max(0, now_ns - self.then_ns)
        self.then_ns += passed
        self.level = min(self.limit * MINUTE_NS, self.level + passed * self.limit)
        return self.level // MINUTE_NS

    def take(self, units: int) -> None:
        self.level -= units * MINUTE_NS

    def give(self, units: int) -> None:
        self.level = min(self.limit * MINUTE_NS, self.level + units * MINUTE_NS)

    def wait_s(self, units: int) -> float:
        """From the last look until `units` are there."""
        return max(0, units * MINUTE_NS - self.level) / self.limit / 1e9


class Budget:
    """Tokens of a period. used: settled ones; reserved: of running exchanges that were admitted in this period."""

    __slots__ = ("limit", "period", "reserved", "used")

    def __init__(self, limit: int, period: int) -> None:
        self.limit, self.period, self.used, self.reserved = limit, period, 0, 0

    def roll(self, period: int) -> None:
        if period != self.period:
            self.period, self.used, self.reserved = period, 0, 0

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used - self.reserved)


class Account:
    """The state of one key, kept when the key file is read again."""

    __slots__ = ("day", "key", "month", "requests", "streams", "tokens")

    def __init__(self, key: Key, *, now_ns: int, wall_s: int) -> None:
        day, month = periods(wall_s)
        self.key = key
        self.streams = 0
        self.requests = Bucket(key.requests_per_minute, now_ns)
        self.tokens = Bucket(key.tokens_per_minute, now_ns)
        self.day = Budget(key.tokens_per_day, day)
        self.month = Budget(key.tokens_per_month, month)

    def change(self, key: Key, now_ns: int) -> None:
        """The key file was read again. A bucket whose limit changed starts full."""
        if key.requests_per_minute != self.key.requests_per_minute:
            self.requests = Bucket(key.requests_per_minute, now_ns)
        if key.tokens_per_minute != self.key.tokens_per_minute:
            self.tokens = Bucket(key.tokens_per_minute, now_ns)
        self.day.limit, self.month.limit = key.tokens_per_day, key.tokens_per_month
        self.key = key

    def budgets(self, wall_s: int) -> list[tuple[str, Budget]]:
        """Those that the key has, as of now. Use is counted without a limit too: one may be given later."""
        day, month = periods(wall_s)
        self.day.roll(day)
        self.month.roll(month)
        return [(name, b) for name, b in (("day", self.day), ("month", self.month)) if b.limit]


class Ticket:
    """What one exchange holds of its account, from admission to settling. key_id "" and account None: no keys."""

    __slots__ = (
        "account", "budget", "capped", "day", "entry", "first_ns", "first_step", "key_id", "last_ns", "lookup", "month",
        "operation", "rate", "record", "steps", "usage",
    )  # fmt: skip

    def __init__(self, account: Account | None = None, operation: str = "") -> None:
        self.account = account
        self.key_id = account.key.id if account is not None else ""
        self.operation = operation
        self.lookup = False  #: the ledger must be asked about the operation before anything is generated
        self.rate = 0  #: tokens taken from the rate's bucket
        self.budget = 0  #: tokens reserved of the budgets of `day` and `month`
        self.day = self.month = 0
        self.capped = False  #: the engine was given fewer tokens than the request asked for: the budget's rest
        self.entry = -1  #: of the table of open exchanges
        self.first_step = 0  #: the engine's step of the first token
        self.steps = 0  #: engine steps that it took part in (without a counters page: from its first token on)
        #: when its first and last tokens were sampled; without a page 0, and when the engine's last record came
        self.first_ns = self.last_ns = 0
        self.usage = Usage()  #: the final counts, once settled
        self.record: Record | None = None  #: what the ledger is given, once settled

    def take(self, steps: int, first_ns: int, last_ns: int) -> None:
        """Steps and stamps of a choice that has ended; 0: not known. Of several choices, the most and the widest."""
        self.steps = max(self.steps, steps)
        self.last_ns = max(self.last_ns, last_ns)
        if first_ns:
            self.first_ns = min(self.first_ns or first_ns, first_ns)


class Rules(Protocol):
    """`accounts.py`, for one process or for several."""

    def admit(self, account: Account, now_ns: int, wall_s: int) -> None: ...
    def reserve(
        self, ticket: Ticket, *, prompt: int, n: int, asked: int | None, room: int, now_ns: int, wall_s: int
    ) -> int: ...
    def settle(self, ticket: Ticket, tokens: int) -> None: ...
    def limits(self, account: Account, now_ns: int) -> list[Limit]: ...


def periods(wall_s: int) -> tuple[int, int]:
    """(days since 1970, months since year 0) in UTC."""
    return _periods(wall_s // 86_400)


@lru_cache(maxsize=4)
def _periods(day: int) -> tuple[int, int]:
    when = datetime.fromtimestamp(day * 86_400, UTC)
    return day, when.year * 12 + when.month - 1


def month_start(wall_s: int) -> int:
    """First day of the month, in days since 1970."""
    return wall_s // 86_400 - (datetime.fromtimestamp(wall_s, UTC).day - 1)


def _rest_s(name: str, wall_s: int) -> int:
    """Seconds until a budget's period is over."""
    if name == "day":
        return 86_400 - wall_s % 86_400
    first = datetime.fromtimestamp(wall_s, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return max(1, int(((first + timedelta(days=32)).replace(day=1)).timestamp()) - wall_s)


def admit(account: Account, now_ns: int, wall_s: int) -> None:
    """Take one request and one stream. Raises RateLimited, and takes nothing then."""
    key = account.key
    if key.max_streams and account.streams >= key.max_streams:
        raise RateLimited(
            f"key '{key.id}' has {account.streams} streams open, its limit", code="too_many_streams", retry_after_s=1
        )
    for name, budget in account.budgets(wall_s):
        if not budget.left:
            raise _exhausted(key, name, budget, wall_s)
    if key.tokens_per_minute and account.tokens.available(now_ns) < 1:
        raise _limited(account, now_ns, "tokens", account.tokens, 1)
    if key.requests_per_minute:
        if account.requests.available(now_ns) < 1:
            raise _limited(account, now_ns, "requests", account.requests, 1)
        account.requests.take(1)
    account.streams += 1


def reserve(ticket: Ticket, *, prompt: int, n: int, asked: int | None, room: int, now_ns: int, wall_s: int) -> int:
    """Tokens that each choice may generate: `asked` or `room` (nothing asked), or less where a budget ends sooner.

    Raises RateLimited or QuotaExceeded, and reserves nothing then.
    """
    account = ticket.account
    most = asked if asked is not None else room
    if account is None:
        return most
    for name, budget in account.budgets(wall_s):
        share = (budget.left - prompt) // n
        if share < 1:
            raise _exhausted(account.key, name, budget, wall_s)
        if share < most:
            most, ticket.capped = share, True
    if account.key.tokens_per_minute:
        bucket, least = account.tokens, prompt + n * (most if asked is not None else 1)
        available = bucket.available(now_ns)
        if available < min(least, bucket.limit):
            ticket.capped = False
            raise _limited(account, now_ns, "tokens", bucket, min(least, bucket.limit))
        ticket.rate = max(least, min(available, prompt + n * most))
        bucket.take(ticket.rate)
    ticket.budget = prompt + n * most
    ticket.day, ticket.month = account.day.period, account.month.period
    account.day.reserved += ticket.budget
    account.month.reserved += ticket.budget
    return most


def settle(ticket: Ticket, tokens: int) -> None:
    """The exchange is over and has used so many tokens. Once per ticket of an admitted request."""
    account = ticket.account
    if account is None:
        return
    account.streams -= 1
    if account.key.tokens_per_minute and ticket.rate:
        account.tokens.give(ticket.rate)
        account.tokens.take(tokens)
    if ticket.budget:
        for budget, period in ((account.day, ticket.day), (account.month, ticket.month)):
            if budget.period == period:
                budget.reserved -= ticket.budget
                budget.used += tokens


def limits(account: Account, now_ns: int) -> list[Limit]:
    """The rates of a key and what is left of them, for x-ratelimit-* headers."""
    found = []
    for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
        if bucket.limit:
            left = max(0, bucket.available(now_ns))
            found.append(Limit(name, bucket.limit, left, bucket.wait_s(bucket.limit)))
    return found


def _limited(account: Account, now_ns: int, name: str, bucket: Bucket, units: int) -> RateLimited:
    error = RateLimited(
        f"key '{account.key.id}' may use {bucket.limit} {name} per minute; this request has to wait",
        retry_after_s=bucket.wait_s(units),
    )
    error.limits = limits(account, now_ns)
    return error


def _exhausted(key: Key, name: str, budget: Budget, wall_s: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"key '{key.id}' has {budget.left} of its {budget.limit} tokens per {name} left, which is not enough",
        retry_after_s=_rest_s(name, wall_s),
    )


def self_test() -> None:
    """An over-budget request is refused: a limiter that is not connected must not go unnoticed. Raises StartupError."""
    account = Account(Key(id="self-test", hash=b"", tokens_per_day=10), now_ns=0, wall_s=0)
    admit(account, 0, 0)
    reserve(Ticket(account), prompt=5, n=1, asked=5, room=5, now_ns=0, wall_s=0)
    try:
        admit(account, 0, 0)
    except QuotaExceeded:
        return
    raise StartupError("the budget check does not refuse anything; this is a bug")


def load_used(accounts: Mapping[str, Account], day: Mapping[str, int], month: Mapping[str, int]) -> None:
    """What the ledger says was used in the present day and month."""
    for id, account in accounts.items():
        account.day.used = day.get(id, 0)
        account.month.used = month.get(id, 0)
