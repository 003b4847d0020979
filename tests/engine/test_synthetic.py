"""The synthetic engine against the replica's contract, with a clock that the test turns."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from evap.config import EngineConfig
from evap.engine.synthetic import SyntheticReplica
from evap.engine.synthetic_text import EOS
from evap.messages import NO_TOKEN, SILENT, Finish, GenerateRequest, ReplicaState, SamplingParams
from tests.engine.synthetic_bench import TEXT, Bench, ManualClock, one


def test_max_tokens_ends_with_length() -> None:
    bench = one(max_tokens=7)
    assert len(bench.tokens()) == 7
    assert bench.finish() is Finish.LENGTH


def test_the_end_token_follows_the_text_and_is_silent() -> None:
    bench = one(config={"synthetic_tokens": 5}, max_tokens=50)
    assert len(bench.tokens()) == 6
    assert bench.records[0, 0][-1] == (EOS, 5, SILENT | Finish.STOP)


def test_ignore_eos_and_min_tokens_put_the_end_off() -> None:
    assert len(one(config={"synthetic_tokens": 5}, max_tokens=300, ignore_eos=True).tokens()) == 300
    assert len(one(config={"synthetic_tokens": 5}, max_tokens=50, min_tokens=20).tokens()) == 21


def test_the_context_is_a_limit() -> None:
    prompt = "hello"
    length = len(TEXT.encode(prompt))
    assert len(one(prompt, {"max_model_len": length + 4}, max_tokens=100).tokens()) == 4


def test_every_stream_says_its_own_canary_while_others_come_and_go() -> None:
    bench = Bench(max_running=7)
    for wave in range(4):
        for slot in range(20):
            bench.submit(f"canary:w{wave}s{slot}", slot, wave, max_tokens=8 + 3 * slot)
        bench.run()
    for wave, slot in itertools.product(range(4), range(20)):
        assert set(bench.text(slot, wave).split()[:-1]) == {f"w{wave}s{slot}"}
        assert bench.finish(slot, wave) is Finish.LENGTH


def test_a_step_is_one_batch_and_batches_cannot_be_changed_behind_the_engine() -> None:
    bench = Bench()
    for slot in range(5):
        bench.submit(slot=slot, max_tokens=6)
    bench.run()
    assert [len(b) for b in bench.batches] == [5] * 6
    assert [b.step for b in bench.batches] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="read-only"):
        bench.batches[0].slot[0] = 9


def test_pacing() -> None:
    bench = Bench(synthetic_ttft_ms=100.0, synthetic_step_ms=10.0)
    bench.submit(max_tokens=5)
    bench.clock.advance(0.0995)
    assert not bench.batches
    bench.clock.advance(0.001)
    assert len(bench.batches) == 1
    bench.clock.advance(0.0385)
    assert len(bench.batches) == 4
    bench.clock.advance(0.5)
    assert bench.finish() is Finish.LENGTH


def test_a_late_loop_does_not_make_it_hurry() -> None:
    bench = Bench(synthetic_step_ms=10.0)
    bench.submit(max_tokens=500)
    bench.run()
    bench.clock.now += 5.0
    bench.run()
    assert len(bench.batches) == 2


def test_no_more_than_max_running_at_once_and_urgent_ones_first() -> None:
    bench = Bench(max_running=2)
    for slot, priority in enumerate((0, 0, 5, 1)):
        params = SamplingParams(max_tokens=3)
        bench.replica.submit(slot, 0, GenerateRequest(prompt_ids=[1], sampling=params, priority=priority))
    bench.run()
    assert all(len(b) <= 2 for b in bench.batches)
    order = [slot for b in bench.batches for slot in b.slot.tolist()]
    assert order.index(3) <= order.index(2)
    assert {bench.finish(s) for s in range(4)} == {Finish.LENGTH}


@pytest.mark.parametrize("when", ["queued", "silent", "running"])
def test_a_cancel_is_confirmed_in_the_next_pass(when: str) -> None:
    bench = Bench(max_running=1, synthetic_ttft_ms=50.0 if when == "silent" else 0.0, synthetic_step_ms=10.0)
    if when == "queued":
        bench.submit(slot=9, max_tokens=1000)
    bench.submit(max_tokens=100)
    bench.run()
    before = len(bench.tokens())
    assert before == (when == "running")
    bench.replica.cancel(0, 1)  # another generation: ignored
    bench.replica.cancel(5, 0)
    bench.replica.cancel(0, 0)
    bench.replica.cancel(0, 0)
    assert bench.finish() is Finish.NONE  # never from inside the call
    bench.run()
    assert bench.finish() is Finish.CANCELLED
    bench.clock.advance(1.0)
    assert len(bench.tokens()) == before
    bench.submit(generation=1, max_tokens=2)
    bench.replica.cancel(9, 0)
    bench.clock.advance(1.0)
    assert bench.finish(0, 1) is Finish.LENGTH


def test_fail_ends_everything_with_an_error_and_a_restart_serves_again() -> None:
    bench = Bench(max_running=1, synthetic_step_ms=10.0)
    bench.submit(slot=0, max_tokens=100)
    bench.submit(slot=1, max_tokens=100)
    bench.run()
    bench.replica.fail("test", restart_s=1.0)
    assert [bench.finish(s) for s in (0, 1)] == [Finish.ERROR] * 2
    bench.submit(slot=0, generation=1)
    bench.run()
    assert bench.finish(0, 1) is Finish.ERROR
    bench.clock.advance(1.1)
    bench.submit(slot=0, generation=2)
    bench.clock.advance(1.0)
    assert bench.finish(0, 2) is Finish.LENGTH
    assert bench.states == [ReplicaState.READY, ReplicaState.FAILED, ReplicaState.READY]


def test_hang_is_silent_until_resume() -> None:
    bench = Bench(synthetic_step_ms=10.0)
    bench.submit(slot=0, max_tokens=100)
    bench.submit(slot=1, max_tokens=100)
    bench.run()
    bench.replica.hang()
    bench.replica.cancel(1, 0)
    bench.clock.advance(10.0)
    assert len(bench.batches) == 1
    bench.replica.resume()
    bench.clock.advance(2.0)
    assert bench.finish(0) is Finish.LENGTH
    assert bench.finish(1) is Finish.CANCELLED


def test_a_prompt_can_do_harm_only_when_asked_for() -> None:
    assert one("fault:fail", max_tokens=2).finish() is Finish.LENGTH
    faulty = {"model": "synthetic-faults"}
    bench = one("fault:fail", faulty, max_tokens=2000)
    assert bench.finish() is Finish.ERROR
    bench.clock.advance(1.5)
    assert bench.replica.state is ReplicaState.READY
    assert one("fault:hang", faulty, max_tokens=2).finish() is Finish.NONE


def test_stop_leaves_nobody_waiting() -> None:
    bench = Bench(synthetic_step_ms=10.0)
    bench.submit(max_tokens=100)
    bench.run()
    asyncio.run(bench.replica.stop())
    assert bench.finish() is Finish.ERROR
    bench.clock.advance(1.0)
    assert bench.states[-1] is ReplicaState.STOPPED


def test_info() -> None:
    replica = SyntheticReplica(EngineConfig(max_running=3), ManualClock())
    with pytest.raises(RuntimeError):
        _ = replica.info
    asyncio.run(replica.start())
    info = replica.info
    assert (info.engine, info.vocab_size, info.max_running) == ("synthetic", TEXT.vocab_size, 3)


def test_it_imports_no_heavy_package() -> None:
    code = (
        "import sys, evap.engine.synthetic; sys.exit(bool({'torch', 'tokenizers', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class Life(RuleBasedStateMachine):
    """Any order of submit, cancel, time, hang and failure: one final record per submission, indices without gaps."""

    @initialize(max_running=st.integers(1, 4), ttft=st.sampled_from([0.0, 15.0]), step=st.sampled_from([0.0, 10.0]))
    def start(self, max_running: int, ttft: float, step: float) -> None:
        self.bench = Bench(
            max_running=max_running, synthetic_ttft_ms=ttft, synthetic_step_ms=step, synthetic_tokens=200
        )
        self.generation: dict[int, int] = defaultdict(int)
        self.wanted: dict[tuple[int, int], int] = {}

    def _open(self, slot: int) -> bool:
        return self.bench.finish(slot, self.generation[slot]) is Finish.NONE and bool(self.generation[slot])

    @rule(slot=st.integers(0, 6), count=st.integers(1, 250), canary=st.booleans())
    def submit(self, slot: int, count: int, canary: bool) -> None:
        if not self._open(slot):
            self.generation[slot] += 1
            key = slot, self.generation[slot]
            self.wanted[key] = count
            self.bench.submit(f"canary:c{slot}" if canary else "x", *key, max_tokens=count, seed=slot)

    @rule(slot=st.integers(0, 6), old=st.booleans())
    def cancel(self, slot: int, old: bool) -> None:
        self.bench.replica.cancel(slot, self.generation[slot] - old)

    @rule(seconds=st.sampled_from([0.0, 0.005, 0.05, 1.0]))
    def time_passes(self, seconds: float) -> None:
        if self.bench.replica.config.synthetic_step_ms:
            self.bench.clock.advance(seconds)
        else:
            self.bench.run(int(seconds * 100) + 1)

    @rule()
    def fail(self) -> None:
        self.bench.replica.fail("test", 0.01)

    @rule()
    def hang_for_a_while(self) -> None:
        self.bench.replica.hang()
        self.bench.clock.turn()
        self.bench.replica.resume()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.clock.advance(0.1)
            self.bench.run(100_000)
            self.bench.clock.advance(10_000.0)
            for key, count in self.wanted.items():
                finish = self.bench.finish(*key)
                assert finish is not Finish.NONE
                if finish in (Finish.LENGTH, Finish.STOP):
                    assert len(self.bench.tokens(*key)) == min(count, 201)

    @invariant()
    def batches_are_sane(self) -> None:
        if hasattr(self, "bench"):
            for batch in self.bench.batches:
                running = [
                    s for s, f in zip(batch.slot.tolist(), batch.flags.tolist(), strict=True) if not f & NO_TOKEN
                ]
                assert len(running) <= self.bench.replica.config.max_running
                assert len(set(running)) == len(running)
            self.bench.batches.clear()


Life.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase
