"""Records: what is charged for, and which operations may be tried again."""

from __future__ import annotations

import pytest

from evap.messages import Usage
from evap.metering.record import COLUMNS, Record, billable, charged, decode, encode, end_of, used_up

USAGE = Usage(prompt=7, cached=2, computed=12, emitted=10, delivered=6)


def test_a_record_survives_its_encoding() -> None:
    record = Record("a", "k", "op", "m", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 200, "stop")
    assert decode(encode(record)) == record
    assert len(COLUMNS) == 18


@pytest.mark.parametrize(
    ("policy", "end", "tokens"),
    [("delivered", "stop", 6), ("emitted", "stop", 10), ("emitted", "client_abort", 10),
     ("emitted", "engine_failed", 6), ("emitted", "interrupted", 6)],
)  # fmt: skip
def test_what_is_billable(policy: str, end: str, tokens: int) -> None:
    assert billable(policy, USAGE, end) == tokens <= USAGE.emitted


def test_a_prompt_without_a_token_costs_nothing() -> None:
    assert charged(Usage(prompt=1000), 0) == 0
    assert charged(USAGE, 6) == 13


def test_clients_that_leave_are_one_end() -> None:
    assert end_of("client_reset") == end_of("client_gone") == "client_abort"
    assert end_of("stop") == "stop"


@pytest.mark.parametrize(
    ("end", "delivered", "submitted", "kept"),
    [("stop", 3, True, "op"), ("client_abort", 0, True, "op"), ("engine_failed", 0, True, ""),
     ("engine_failed", 1, True, "op"), ("invalid", 0, False, "")],
)  # fmt: skip
def test_which_operations_are_used_up(end: str, delivered: int, submitted: bool, kept: str) -> None:
    assert used_up("op", end=end, delivered=delivered, submitted=submitted) == kept
