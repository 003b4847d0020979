"""RFC 9218 4: what is malformed is ignored, as a whole or by its parameter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.protocol.priority import DEFAULT, MAX_VALUE, Priority, parse


@pytest.mark.parametrize(
    ("value", "urgency", "incremental"),
    [
        (b"", 3, False),
        (b"u=0", 0, False),
        (b"u=7, i", 7, True),
        (b"i,u=5", 5, True),
        (b" u=1 , i=?0", 1, False),
        (b"u=1,\ti=?1", 1, True),
        (b"i;a=1;b, u=2;foo=?1", 2, True),
        (b"u=1, u=6", 6, False),
        (b"u=6, u=9", 3, False),  # the last one counts, and it is out of range
        (b"u=8, i", 3, True),
        (b"u=-1, i", 3, True),
        (b"u=1.0, i", 3, True),
        (b'u="1", i', 3, True),
        (b"u=?1", 3, False),
        (b"u", 3, False),
        (b"i=1, u=4", 4, False),
        (b"u=007", 7, False),
        (b"x=(1 2;q=0.5 \"a\"), y=:aGk=:, z=tok/en, u=2, *a-b.c=-1.5", 2, False),
        (b"u=1 i", 3, False),
        (b"u=1,", 3, False),
        (b",u=1", 3, False),
        (b"U=1", 3, False),
        (b"u=1; I", 3, False),
        (b"u==1", 3, False),
        (b"u=(1", 3, False),
        (b'u="1', 3, False),
        (b"u=1\x00", 3, False),
        (b"\xffu=1", 3, False),
        (b"u=1, x=" + b"a" * MAX_VALUE, 3, False),
    ],
)  # fmt: skip
def test_values(value: bytes, urgency: int, incremental: bool) -> None:
    assert parse(value) == Priority(urgency, incremental)


@given(st.binary(max_size=80) | st.text('ui=?01234567,; \t()"x:', max_size=80).map(str.encode))
def test_nothing_raises_and_everything_is_in_range(value: bytes) -> None:
    urgency, incremental = parse(value)
    assert 0 <= urgency <= 7
    assert type(incremental) is bool


@given(st.integers(0, 7), st.booleans())
def test_what_browsers_write(urgency: int, incremental: bool) -> None:
    value = f"u={urgency}" + (", i" if incremental else "")
    assert parse(value.encode()) == Priority(urgency, incremental)
    assert parse(b"") is DEFAULT
