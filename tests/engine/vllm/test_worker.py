"""The meter in the worker: every sampled and kept token, no prefill chunk, each prompt once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evap.engine.vllm.ids import make
from evap.engine.vllm.worker import Counter, wrap
from evap.messages import Finish
from evap.metering.counters import WRITERS
from evap.metering.page import PageReader, format_page, map_page_file, open_page_file
from evap.metering.writer import Join, NumpyMeter
from tests.engine.vllm.live import NEEDS_VLLM, Live, ask, engine

SLOTS = 256
NONCE = "0a0b0c"


def scheduled(*new: Any, finished: Sequence[str] = ()) -> Any:
    return SimpleNamespace(scheduled_new_reqs=list(new), finished_req_ids=set(finished))


def new(request_id: str, prompt: int = 10, cached: int = 0, limit: int = 5) -> Any:
    params = SimpleNamespace(eos_token_id=1, max_tokens=limit)
    return SimpleNamespace(
        req_id=request_id, prompt_token_ids=[5] * prompt, num_computed_tokens=cached, sampling_params=params
    )


def name(number: int, slot: int, generation: int) -> str:
    return make(NONCE, number, slot, generation)


def lists(*rows: tuple[str, list[int]]) -> Any:
    return SimpleNamespace(req_ids=[i for i, _ in rows], sampled_token_ids=[tokens for _, tokens in rows])


@pytest.fixture
def page() -> tuple[Counter, PageReader]:
    memory = bytearray(1 << 17)
    format_page(memory, SLOTS, epoch_device_ns=0, epoch_unix_ns=0)
    counter = Counter(Join)
    counter.add(0, NONCE, NumpyMeter(memory))
    return counter, PageReader(memory)


def test_tokens_are_counted_by_slot(page: tuple[Counter, PageReader]) -> None:
    counter, reader = page
    counter.before(scheduled(new(name(0, 7, 3), prompt=40, cached=16), new(name(1, 9, 4))))
    counter.after(lists((name(0, 7, 3), [50]), (name(1, 9, 4), [])))  # the second is in the middle of its prefill
    counter.before(scheduled())
    counter.after(lists((name(0, 7, 3), [51, 52]), (name(1, 9, 4), [60])))  # the first guessed one ahead
    row = reader.row(7)
    assert row is not None
    assert (row.generation, row.prompt, row.cached, row.computed, row.emitted, row.steps) == (3, 40, 16, 3, 3, 2)
    other = reader.row(9)
    assert other is not None
    assert (other.generation, other.computed) == (4, 1)


def test_a_token_past_the_end_is_computed_and_not_emitted(page: tuple[Counter, PageReader]) -> None:
    counter, reader = page
    counter.before(scheduled(new(name(0, 7, 3), limit=2)))
    counter.after(lists((name(0, 7, 3), [50, 51, 52])))
    row = reader.row(7)
    assert row is not None
    assert (row.computed, row.emitted, row.finish) == (3, 2, Finish.LENGTH)


def test_a_preempted_request_keeps_its_counts(page: tuple[Counter, PageReader]) -> None:
    counter, reader = page
    counter.before(scheduled(new(name(0, 7, 3), prompt=40)))
    counter.after(lists((name(0, 7, 3), [50])))
    counter.before(scheduled(new(name(0, 7, 3), prompt=40)))
    counter.after(lists((name(0, 7, 3), [51])))
    row = reader.row(7)
    assert row is not None
    assert (row.prompt, row.computed) == (40, 2)


def test_a_slot_taken_again_starts_from_nothing(page: tuple[Counter, PageReader]) -> None:
    counter, reader = page
    counter.before(scheduled(new(name(0, 7, 3))))
    counter.after(lists((name(0, 7, 3), [50])))
    counter.before(scheduled(new(name(1, 7, 4)), finished=[name(0, 7, 3)]))
    counter.after(lists((name(1, 7, 4), [60]), (name(0, 7, 3), [99])))  # the old one's is late
    row = reader.row(7)
    assert row is not None
    assert (row.generation, row.computed) == (4, 1)


def test_each_process_has_a_page_and_slots_of_its_own() -> None:
    """Two processes use the same slots; one of them is started again while its request is still in the batch."""
    pages = [bytearray(1 << 17) for _ in range(3)]
    for memory in pages:
        format_page(memory, SLOTS, epoch_device_ns=0, epoch_unix_ns=0)
    one, other, again = (PageReader(memory) for memory in pages)
    counter = Counter(Join)
    counter.add(1, "000001", NumpyMeter(pages[0]))
    counter.add(2, "000002", NumpyMeter(pages[1]))
    mine, theirs, nobodys = (make(nonce, 0, 7, 3) for nonce in ("000001", "000002", "000003"))
    counter.before(scheduled(new(mine, prompt=40), new(theirs, prompt=50), new(nobodys)))
    counter.after(lists((mine, [50]), (theirs, [51, 52]), (nobodys, [53])))
    counter.after(lists((theirs, [54])))
    rows = one.row(7), other.row(7)
    assert [(row.prompt, row.computed) for row in rows if row] == [(40, 1), (50, 3)]
    assert (one.heartbeat(), other.heartbeat()) == (1, 2)  # steps in which it had a row

    counter.add(2, "000004", NumpyMeter(pages[2]))
    counter.after(lists((mine, [60]), (theirs, [61])))
    assert [row.computed for row in (one.row(7), other.row(7)) if row] == [2, 3]
    assert again.row(7) is None
    replaced = make("000004", 0, 7, 3)
    counter.before(scheduled(new(replaced, prompt=9)))
    counter.after(lists((replaced, [1]), (mine, [2])))
    row = again.row(7)
    assert row is not None
    assert (row.prompt, row.computed) == (9, 1)


def test_requests_that_are_not_ours_do_not_count(page: tuple[Counter, PageReader]) -> None:
    counter, reader = page
    counter.before(scheduled(new("warm-up")))
    counter.after(lists(("warm-up", [50])))
    counter.after(SimpleNamespace(sampled_token_ids=[]))
    assert reader.row(0) is None


class Tensor:
    """As much of a torch tensor as the counter uses."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def __getitem__(self, place: slice) -> Tensor:
        return Tensor(self._values[place])

    def __ge__(self, other: int) -> Tensor:
        return Tensor(self._values >= other)

    def sum(self, axis: int) -> Tensor:
        return Tensor(self._values.sum(axis))

    def numpy(self) -> Any:
        return self._values


def test_an_engine_that_schedules_ahead_hands_over_a_tensor(page: tuple[Counter, PageReader]) -> None:
    counter, reader = page
    counter.before(scheduled(new(name(0, 7, 3)), new(name(1, 9, 4)), new(name(2, 8, 1))))
    tokens = Tensor([[50, 51, -1], [60, -1, -1], [70, 71, 72]])
    inner = SimpleNamespace(req_ids=[name(0, 7, 3), name(1, 9, 4), name(2, 8, 1)])
    counter.after(SimpleNamespace(_model_runner_output=inner, _sampled_token_ids=tokens, _invalid_req_indices=[1]))
    rows = [reader.row(slot) for slot in (7, 9, 8)]
    assert [row.computed if row else None for row in rows] == [2, 0, 3]


def test_the_runner_is_wrapped_and_its_results_pass_through(page: tuple[Counter, PageReader]) -> None:
    counter, reader = page
    output = lists((name(0, 7, 3), [50]))
    runner = SimpleNamespace(
        execute_model=lambda s, extra=None: ("forward", extra), sample_tokens=lambda grammar: output
    )
    wrap(runner, counter)
    assert runner.execute_model(scheduled(new(name(0, 7, 3))), extra=5) == ("forward", 5)
    assert runner.sample_tokens(None) is output
    assert reader.row(7) is not None


@pytest.fixture(scope="module")
def metered(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, PageReader]]:
    """An engine with a page, prefill in chunks, few KV blocks and guesses."""
    path = tmp_path_factory.mktemp("page") / "page"
    memory = open_page_file(path, SLOTS)
    format_page(memory, SLOTS, epoch_device_ns=time.monotonic_ns(), epoch_unix_ns=time.time_ns())

    def before(replica: Any) -> None:
        replica.meters = [{**WRITERS, "page": str(path)}]

    options = (
        "max_num_batched_tokens=128", "num_gpu_blocks_override=14",
        'speculative_config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":2,"prompt_lookup_min":1}',
    )  # fmt: skip
    with engine(tiny, before, token_path="scheduler", max_model_len=1024, vllm_arg=options) as live:
        reader = PageReader(map_page_file(path)[0])
        yield live, reader
        reader.close()


def live_marks(test: Any) -> Any:
    for mark in NEEDS_VLLM:
        test = mark(test)
    return test


@live_marks
def test_the_page_counts_what_the_engine_gave(metered: tuple[Live, PageReader]) -> None:
    """Chunked prefill, cached prefixes, n-gram guesses and preemption: the page and the answers agree to the token."""
    live, reader = metered
    prompt = [20, 21, 22, 23] * 60
    for requests in (
        [ask(prompt, n=60), ask([9, 8], n=7)],
        [ask([*prompt, 5], n=30), ask([7], n=1)],
        [ask([n + 2, 30, 40], n=500) for n in range(8)],
    ):
        keys = live.submit(requests)
        results = live.results(keys)
        for (slot, generation), request, result in zip(keys, requests, results, strict=True):
            row = reader.row(slot)
            assert row is not None
            assert row.generation == generation
            assert (row.prompt, row.cached) == (len(request.prompt_ids), result.cached)
            assert row.emitted == len(result.tokens)
            assert row.computed >= row.emitted
            assert row.finish == result.finish
            assert row.first_us <= row.last_us
    assert live.replica.mismatches == 0


@live_marks
def test_a_cancelled_request_is_counted_up_to_its_last_step(metered: tuple[Live, PageReader]) -> None:
    live, reader = metered
    keys = live.submit([ask([n + 2], n=900) for n in range(4)])
    live.wait(keys, lambda r: len(r.tokens) > 5)
    for key in keys:
        live.cancel(key)
    for (slot, generation), result in zip(keys, live.results(keys), strict=True):
        row = reader.row(slot)
        assert row is not None
        assert row.generation == generation
        assert row.computed >= len(result.tokens)
        assert row.computed <= len(result.tokens) + 8  # what was under way
