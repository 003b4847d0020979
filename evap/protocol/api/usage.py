"""`GET /v1/usage` (sums, or the exchanges themselves) and `GET /v1/usage/{id}` (one exchange, also a running one)."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from evap.errors import InvalidRequest, NotFound, echo
from evap.messages import Usage
from evap.protocol.api import sse
from evap.protocol.events import HeaderList

GROUPS: Final = ("day", "model", "key")
MAX_LIMIT: Final = 1000
_EPOCH: Final = datetime.date(1970, 1, 1)
_NAMES: Final = ("from", "to", "model", "key", "group_by", "limit", "after")


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Days since 1970 (UTC), inclusive; None: any. exchanges: one row each, `limit` of them, those after `after`."""

    first_day: int | None = None
    last_day: int | None = None
    model: str | None = None
    key: str | None = None
    group_by: tuple[str, ...] = ()
    exchanges: bool = False
    limit: int = 100
    after: int = 0


def parse_query(query: str) -> UsageQuery:
    """`from=2026-01-31&to=..&model=..&key=..&group_by=day,model,key|exchange&limit=..&after=..`. InvalidRequest."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), errors="strict", max_num_fields=16)
    except ValueError:
        raise InvalidRequest("the query is not a list of name=value") from None
    given = dict(pairs)
    if len(given) != len(pairs):
        raise InvalidRequest("a parameter is given twice")
    for name in given:
        if name not in _NAMES:
            raise InvalidRequest(f"unknown parameter '{echo(name)}'; there are {', '.join(_NAMES)}", param=echo(name))
    groups = tuple(g for g in given.get("group_by", "day").split(",") if g)
    exchanges = groups == ("exchange",)
    if not exchanges and (bad := [g for g in groups if g not in GROUPS]):
        raise InvalidRequest(f"group_by: '{echo(bad[0])}' is none of day, model, key, exchange", param="group_by")
    return UsageQuery(
        first_day=_day(given, "from"), last_day=_day(given, "to"), model=given.get("model"), key=given.get("key"),
        group_by=() if exchanges else groups, exchanges=exchanges,
        limit=_number(given, "limit", 100, 1, MAX_LIMIT), after=_number(given, "after", 0, 0, 1 << 62),
    )  # fmt: skip


def _day(given: dict[str, str], name: str) -> int | None:
    if name not in given:
        return None
    try:
        return (datetime.date.fromisoformat(given[name]) - _EPOCH).days
    except ValueError:
        raise InvalidRequest(f"{name} is not a date such as 2026-01-31 (UTC)", param=name) from None


def _number(given: dict[str, str], name: str, default: int, low: int, high: int) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise InvalidRequest(f"{name} must be an integer of {low} to {high}", param=name)
    return int(text)


def day_text(day: int) -> str:
    """2026-01-31"""
    return (_EPOCH + datetime.timedelta(days=day)).isoformat()


def list_body(rows: Sequence[dict[str, Any]], *, pending: int, next_after: int | None = None) -> bytes:
    """pending: settled exchanges that are not in the ledger yet, and so not in these rows. next_after: ask for more."""
    more = {} if next_after is None else {"next_after": next_after}
    return sse.encode({"object": "list", "data": rows, "pending": pending, **more})


def one_body(fields: dict[str, Any]) -> bytes:
    return sse.encode({"object": "usage", **fields})


def trailers(id: str, usage: Usage, end: str) -> HeaderList:
    """evap-usage-*: the counts of an answer, as trailer fields."""
    counts = (
        ("prompt", usage.prompt), ("cached", usage.cached), ("computed", usage.computed), ("emitted", usage.emitted),
        ("delivered", usage.delivered),
    )  # fmt: skip
    fields = [(b"evap-usage-" + name.encode(), b"%d" % count) for name, count in counts]
    return [(b"evap-usage-id", id.encode()), *fields, (b"evap-usage-end", end.encode())]


def unknown(id: str) -> NotFound:
    """Also for an exchange of another key: nobody learns what others' ids are."""
    return NotFound(f"there is no usage record '{echo(id)}'", param="id", code="usage_not_found")
