"""Seam "async-llm" gives what seam "core" gives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from evap.messages import Finish, ReplicaState
from tests.engine.vllm.live import NEEDS_VLLM, Live, ask, engine

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[Live]:
    with engine(tiny, vllm_seam="async-llm") as live:
        yield live


def test_the_same_answers(llm: Live, core: Live) -> None:
    requests = [
        *[ask([n + 2, 9, 11], n=3 + n) for n in range(10)],
        ask(range(2, 300), n=5, logprobs=2, extra={"prompt_logprobs": 1}),
        ask([5, 6], n=9, temperature=1.0, seed=4),
        ask([5, 6], n=9, extra={"guided_choice": ["yes", "no"]}, ignore_eos=False),
    ]
    for found, wanted in zip(llm.generate(*requests), core.generate(*requests), strict=True):
        assert found.tokens == wanted.tokens
        assert (found.finish, found.silent) == (wanted.finish, wanted.silent)
        assert [e.top for e in found.logprobs] == [e.top for e in wanted.logprobs]
        assert [e and e.logprob for e in found.prompt or ()] == [e and e.logprob for e in wanted.prompt or ()]


def test_cancel(llm: Live) -> None:
    keys = llm.submit([ask(n=1500) for _ in range(6)])
    llm.do(lambda: [llm.replica.cancel(*key) for key in keys[:2]] and None)
    llm.wait(keys[2:], lambda r: len(r.tokens) > 2)
    for key in keys[2:]:
        llm.cancel(key)
    assert {r.finish for r in llm.results(keys)} == {Finish.CANCELLED}
    assert llm.replica.running == 0


def test_a_death_is_noticed(llm: Live) -> None:
    keys = llm.submit([ask(n=1900) for _ in range(5)])
    llm.wait(keys, lambda r: len(r.tokens) > 2)
    os.kill(llm.replica.pids()[0], signal.SIGKILL)
    assert {r.finish for r in llm.results(keys, 30)} == {Finish.ERROR}
    assert llm.replica.state is not ReplicaState.READY
