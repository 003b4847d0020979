"""Queries and bodies of /v1/usage."""

from __future__ import annotations

import json

import pytest

from evap.errors import InvalidRequest
from evap.messages import Usage
from evap.protocol.api import usage
from evap.protocol.headers import vet


def test_the_default_is_one_row_a_day() -> None:
    query = usage.parse_query("")
    assert query.group_by == ("day",)
    assert not query.exchanges


def test_all_parameters() -> None:
    query = usage.parse_query("from=1970-01-03&to=2026-01-31&model=a%2Fb&key=k&group_by=key,model&limit=7&after=3")
    assert (query.first_day, query.last_day, query.model, query.key) == (2, 20_484, "a/b", "k")
    assert (query.group_by, query.limit, query.after) == (("key", "model"), 7, 3)
    assert usage.parse_query("group_by=").group_by == ()
    assert usage.parse_query("group_by=exchange").exchanges
    assert usage.day_text(20_484) == "2026-01-31"


@pytest.mark.parametrize(
    "query",
    ["from=yesterday", "from=2026-02-30", "limit=0", "limit=1001", "limit=1e3", "limit=-1", "after=x", "group_by=user",
     "group_by=exchange,day", "x=1", "key=a&key=b", "nonsense", "&&=", "key=%ff", "from=2026-01-01T00:00"],
)  # fmt: skip
def test_what_is_wrong_is_said(query: str) -> None:
    with pytest.raises(InvalidRequest):
        usage.parse_query(query)


def test_bodies() -> None:
    assert json.loads(usage.list_body([{"day": "x"}], pending=2)) == {
        "object": "list", "data": [{"day": "x"}], "pending": 2,
    }  # fmt: skip
    assert json.loads(usage.list_body([], pending=0, next_after=9))["next_after"] == 9
    assert json.loads(usage.one_body({"id": "a"})) == {"object": "usage", "id": "a"}
    assert usage.unknown("x").code == "usage_not_found"


def test_trailers_are_fields_that_can_be_sent() -> None:
    fields = usage.trailers("chatcmpl-1", Usage(prompt=1, cached=0, computed=4, emitted=3, delivered=2), "stop")
    vet(fields)
    assert dict(fields)[b"evap-usage-delivered"] == b"2"
