"""Idempotency keys: one generation per operation."""

from __future__ import annotations

import pytest

from evap.errors import Conflict, InvalidRequest
from evap.metering import operations
from evap.metering.operations import Operations


def test_a_running_and_a_finished_one_are_refused_by_name() -> None:
    it = Operations()
    it.begin("alice", "op", "id-1")
    with pytest.raises(Conflict, match="/v1/usage/id-1") as error:
        it.begin("alice", "op", "id-2")
    assert error.value.code == "operation_running"
    it.begin("bob", "op", "id-3")  # another key, another operation
    it.end("alice", "op", "id-1", used_up=True)
    with pytest.raises(Conflict, match="id-1") as error:
        it.begin("alice", "op", "id-4")
    assert error.value.code == "operation_complete"
    it.end("bob", "op", "id-3", used_up=False)
    it.begin("bob", "op", "id-5")


def test_it_knows_when_it_has_forgotten() -> None:
    it = Operations(remembered=2)
    for number in range(2):
        it.remember("a", str(number), "id")
    assert not it.forgot
    it.remember("a", "2", "id")
    assert it.forgot
    it.begin("a", "0", "id")
    with pytest.raises(Conflict):
        it.begin("a", "2", "id")


@pytest.mark.parametrize("header", [b"", b"x" * 129, b"a b", b"a\x00", b"\xff"])
def test_names_that_are_none(header: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Idempotency-Key"):
        operations.read(header)


def test_names() -> None:
    assert operations.read(b"stainless-python-retry-00000000-0000-4000-8000-000000000000").startswith("stainless")
