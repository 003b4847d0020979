"""What a request's head says: order, deadline, id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap import terms
from evap.messages import ParsedRequest, SamplingParams
from evap.metering.accounts import Account, Key
from tests.fakes import head


def asked(priority: int | None = None) -> ParsedRequest:
    return ParsedRequest(model=None, prompt_text="x", sampling=SamplingParams(), priority=priority)


def key(**rights: int) -> Account:
    return Account(Key(id="k", hash=b"", **rights), now_ns=0, wall_s=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "body", "rights", "order"),
    [
        (None, None, None, 0),
        ("u=0", None, None, -3),
        ("u=7", None, None, 4),
        ("u=3, i", None, None, 0),
        ("u=9", None, None, 0),
        ("u=0", 2, None, 2),
        (None, -100, None, -3),
        (None, 1000, None, terms.LATEST),
        (None, None, {"priority": -1}, -8),
        ("u=0", None, {"priority": -1}, -11),
        ("u=7", None, {"priority": -1}, -4),
        ("u=0", None, {"priority": 1}, 5),
        ("u=0", None, {"most_urgent": 2}, -1),
        (None, -3, {"most_urgent": 3}, 0),
        (None, None, {"most_urgent": 5}, 2),
        ("u=6", None, {"most_urgent": 3}, 3),
    ],
)
def test_priority(header: str | None, body: int | None, rights: dict[str, int] | None, order: int) -> None:
    at = head(priority=header) if header is not None else head()
    account = key(**rights) if rights is not None else None
    assert terms.priority(account, at, asked(body)) == order


def test_an_update_replaces_the_header() -> None:
    assert terms.priority(None, head(priority="u=0"), asked(), b"u=6") == 3
    assert terms.priority(None, head(priority="u=0"), asked(), b"") == 0
    assert terms.priority(None, head(), asked(-2), b"u=6") == -2


@given(st.binary(max_size=20), st.integers(-(2**31), 2**31 - 1) | st.none(), st.integers(-5, 5), st.integers(0, 7))
def test_nothing_a_request_says_lifts_it_over_its_class(
    header: bytes, body: int | None, own: int, most_urgent: int
) -> None:
    at = head(priority=header.decode("latin-1"))
    at.index[b"priority"] = header
    order = terms.priority(key(priority=own, most_urgent=most_urgent), at, asked(body))
    assert order >= own * 8 + most_urgent - 3
    assert order > (own - 1) * 8 + 4
