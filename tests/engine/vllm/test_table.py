"""What runs in a process, as the host of the engine reads it."""

from __future__ import annotations

import os

from evap.engine.vllm.ids import nonce_of, parse
from evap.engine.vllm.runs import Runs
from evap.engine.vllm.table import SIZE, Table, make_memory, open_table


def test_the_host_sees_what_runs_by_its_ids() -> None:
    fd = make_memory()
    host = open_table(os.dup(fd))
    assert (host.nonce, host.ids()) == ("", [])  # nobody has begun
    runs = Runs(open_table(fd))
    assert (host.nonce, host.ids()) == (runs.nonce, [])
    ids = [runs.open(slot, generation) for slot, generation in ((7, 3), (0, 0), (65_535, 65_535))]
    assert sorted(host.ids()) == sorted(ids)
    assert {nonce_of(id) for id in ids} == {runs.nonce}
    runs.cancelled(ids[:1])
    runs.forget(ids[1])
    assert host.ids() == ids[2:]
    again = runs.open(7, 4)
    assert set(host.ids()) == {again, ids[2]}
    assert parse(again) == (7, 4)


def test_another_process_begins_with_nothing() -> None:
    memory = bytearray(SIZE)
    first = Runs(Table(memory))
    first.open(1, 0)
    second = Runs(Table(memory))
    assert second.nonce != first.nonce
    assert Table(memory).ids() == []
