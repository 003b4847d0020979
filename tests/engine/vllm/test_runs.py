"""Runs: every run ends with exactly one final record, whatever way its tokens took."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from evap.engine.vllm.ids import parse
from evap.engine.vllm.runs import Row, Runs
from evap.engine.vllm.shared import fingerprint
from evap.messages import (
    FINISH_MASK,
    HAS_LOGPROBS,
    META,
    NO_TOKEN,
    SILENT,
    Finish,
    TokenBatch,
    TokenLogprobs,
)


def records(batch: TokenBatch | None) -> list[tuple[int, int, int, int, int]]:
    if batch is None:
        return []
    columns = (batch.slot, batch.generation, batch.token, batch.index, batch.flags)
    return list(zip(*(c.tolist() for c in columns), strict=True))


def plain(runs: Runs, request_ids: Sequence[str], tokens: Sequence[int], rows: Sequence[Row] = ()) -> TokenBatch | None:
    """A step as the seam gives it: slots and generations as arrays."""
    places = [parse(request_id) or (0, 0) for request_id in request_ids]
    slots, generations = (np.array([place[n] for place in places], np.int32) for n in (0, 1))
    return runs.step(slots, generations, np.array(tokens, np.int32), rows)


def ring_batch(*rows: tuple[int, int, int, int, int]) -> TokenBatch:
    slot, generation, token, index, flags = zip(*rows, strict=True)
    ints = [np.array(column, np.int32) for column in (slot, generation, token, index)]
    return TokenBatch(ints[0], ints[1], ints[2], ints[3], np.array(flags, np.uint8))


def test_plain_tokens_count_up_and_need_no_rows() -> None:
    runs = Runs()
    ids = [runs.open(4, 1), runs.open(9, 2)]
    assert records(plain(runs, ids, [50, 60])) == [(4, 1, 50, 0, 0), (9, 2, 60, 0, 0)]
    assert records(plain(runs, list(ids), [51, 61])) == [(4, 1, 51, 1, 0), (9, 2, 61, 1, 0)]
    assert records(plain(runs, [ids[1]], [62])) == [(9, 2, 62, 2, 0)]


def test_the_same_array_of_slots_is_known_and_a_change_of_who_runs_is_noticed() -> None:
    runs = Runs()
    runs.open(4, 1), runs.open(9, 2)
    slots, generations, tokens = (np.array(column, np.int32) for column in ([4, 9], [1, 2], [50, 60]))
    batches = [runs.step(slots, generations, tokens) for _ in range(3)]
    assert [records(batch)[1] for batch in batches] == [(9, 2, 60, n, 0) for n in range(3)]
    assert [batch is not None and batch.steady for batch in batches] == [False, True, True]
    found = runs.find(9, 2)
    assert found is not None
    runs.cancelled([found])
    assert records(runs.step(slots, generations, tokens)) == [(4, 1, 50, 3, 0)]
    runs.open(9, 3)
    assert records(runs.step(slots, generations, tokens)) == [(4, 1, 50, 4, 0)]


def test_a_row_brings_the_facts_the_tokens_and_the_end_in_order() -> None:
    runs = Runs()
    one = runs.open(3, 7)
    entries = [TokenLogprobs(logprob=-1.0), TokenLogprobs(logprob=-2.0)]
    row = Row(request_id=one, tokens=[5, 6], finish=Finish.STOP, silent=True, logprobs=entries, cached=16)
    batch = plain(runs, [], [], [row])
    assert records(batch) == [
        (3, 7, 16, 0, META),
        (3, 7, 5, 0, HAS_LOGPROBS),
        (3, 7, 6, 1, HAS_LOGPROBS | SILENT | Finish.STOP),
    ]
    assert batch is not None
    assert batch.logprobs == {1: entries[0], 2: entries[1]}
    assert len(runs) == 0


def test_plain_tokens_and_rows_of_one_step_are_one_batch() -> None:
    runs = Runs()
    a, b = runs.open(0, 0), runs.open(1, 0)
    found = records(plain(runs, [a], [5], [Row(request_id=b, tokens=[6], finish=Finish.LENGTH)]))
    assert sorted(found) == [(0, 0, 5, 0, 0), (1, 0, 6, 0, Finish.LENGTH)]
    assert records(plain(runs, [a], [7])) == [(0, 0, 7, 1, 0)]


def test_an_end_without_a_token_and_a_second_end() -> None:
    runs = Runs()
    a = runs.open(2, 0)
    assert records(plain(runs, [], [], [Row(request_id=a, finish=Finish.ERROR)])) == [
        (2, 0, 0, 0, NO_TOKEN | Finish.ERROR)
    ]
    assert plain(runs, [a], [5]) is None
    assert plain(runs, [], [], [Row(request_id=a, tokens=[5])]) is None
    assert runs.cancelled([a]) is None
    assert runs.fail() is None


def test_requests_of_a_dead_engine_do_not_disturb_the_living() -> None:
    runs = Runs()
    old = runs.open(0, 0)
    runs.fail()
    new = runs.open(0, 1)
    assert records(plain(runs, [old, new], [5, 6])) == [(0, 1, 6, 0, 0)]


def test_find_and_cancel_know_generations() -> None:
    runs = Runs()
    a = runs.open(1, 5)
    assert runs.find(1, 5) == a
    assert runs.find(1, 4) is None
    assert runs.find(2, 5) is None
    plain(runs, [a], [9])
    assert records(runs.cancelled([a])) == [(1, 5, 0, 1, NO_TOKEN | Finish.CANCELLED)]
    runs.open(1, 6)
    with pytest.raises(ValueError, match="in use"):
        runs.open(1, 7)


def test_a_run_that_was_refused_leaves_nothing() -> None:
    runs = Runs()
    runs.forget(runs.open(1, 5))
    assert len(runs) == 0
    assert runs.fail() is None
    runs.open(1, 6)


def test_the_ring_and_the_engines_account_agree() -> None:
    runs = Runs()
    a = runs.open(7, 3)
    assert records(runs.ring(ring_batch((7, 3, 0, 0, META), (7, 3, 11, 0, 0), (7, 3, 12, 1, 0)))) != []
    runs.ring(ring_batch((7, 3, 13, 2, Finish.STOP | SILENT)))
    assert len(runs) == 0
    assert runs.unsettled == 1
    assert runs.settle(a, 3, fingerprint([11, 12, 13])) is None
    assert runs.unsettled == 0


@pytest.mark.parametrize(
    ("count", "tokens", "complaint"),
    [(4, [11, 12, 13], "counts 4"), (3, [11, 13, 12], "not those"), (3, [11, 12, 14], "not those")],
)
def test_a_difference_is_told(count: int, tokens: list[int], complaint: str) -> None:
    runs = Runs()
    a = runs.open(7, 3)
    runs.ring(ring_batch((7, 3, 11, 0, 0), (7, 3, 12, 1, 0), (7, 3, 13, 2, Finish.LENGTH)))
    told = runs.settle(a, count, fingerprint(tokens))
    assert told is not None
    assert complaint in told


def test_late_ring_records_are_dropped() -> None:
    runs = Runs()
    runs.cancelled([runs.open(7, 3)])
    runs.open(7, 4)
    assert runs.ring(ring_batch((7, 3, 11, 0, 0))) is None
    assert records(runs.ring(ring_batch((7, 3, 11, 0, 0), (7, 4, 12, 0, 0)))) == [(7, 4, 12, 0, 0)]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), st.randoms())
def test_a_fingerprint_is_of_tokens_and_places(tokens: list[int], random: object) -> None:
    assert fingerprint(tokens) == fingerprint(list(tokens))
    if len(set(tokens)) > 1:
        assert fingerprint(tokens) != fingerprint(tokens[::-1]) or tokens == tokens[::-1]
        assert fingerprint(tokens) != fingerprint(tokens[:-1])


class Lives(RuleBasedStateMachine):
    """Any order of opens, tokens, ends, cancels and a death: indices without gaps, one end each."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs()
        self.open: dict[str, tuple[int, int, int]] = {}  # id -> slot, generation, tokens
        self.generation = 0

    def take(self, batch: TokenBatch | None) -> None:
        for slot, generation, _token, index, flags in records(batch):
            if flags & META:
                continue
            found = [i for i, (s, g, _) in self.open.items() if (s, g) == (slot, generation)]
            assert len(found) == 1, "a record for nobody"
            request_id = found[0]
            assert index == self.open[request_id][2]
            if not flags & NO_TOKEN:
                self.open[request_id] = (slot, generation, index + 1)
            if flags & FINISH_MASK:
                del self.open[request_id]

    @rule(slot=st.integers(0, 5))
    def begin(self, slot: int) -> None:
        if slot in [s for s, _, _ in self.open.values()]:
            return
        self.generation += 1
        self.open[self.runs.open(slot, self.generation)] = (slot, self.generation, 0)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        ids = [i for i in self.open if data.draw(st.booleans())]
        ones = [i for i in ids if data.draw(st.booleans())]
        rows = [
            Row(
                request_id=i,
                tokens=data.draw(st.lists(st.integers(0, 9), max_size=3)),
                finish=data.draw(st.sampled_from(list(Finish))),
                cached=data.draw(st.sampled_from([None, 0, 3])),
            )
            for i in ids
            if i not in ones
        ]
        self.take(plain(self.runs, ones, [1] * len(ones), rows))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.take(self.runs.cancelled([i for i in self.open if data.draw(st.booleans())]))

    @rule()
    def die(self) -> None:
        self.take(self.runs.fail())
        assert not self.open

    @invariant()
    def same_number(self) -> None:
        assert len(self.runs) == len(self.open)


TestLives = Lives.TestCase
