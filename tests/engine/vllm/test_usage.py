"""How much of the KV cache generations hold, from inside the engine core, on both ways that tokens take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evap.messages import Finish
from tests.clients.asking import eventually
from tests.engine.vllm.live import NEEDS_VLLM, Live, ask, engine

pytestmark = NEEDS_VLLM
PATHS = ("core", "scheduler")


@pytest.fixture(scope="module", params=PATHS)
def live(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Live]:
    with engine(tiny, token_path=request.param) as it:
        yield it


def soon(check: Callable[[], bool]) -> bool:
    """The engine writes it after the step whose tokens have come."""
    return eventually(check, "the engine does not say it") >= 0


def test_what_runs_holds_its_share(live: Live) -> None:
    replica = live.replica
    assert soon(lambda: replica.kv_usage == 0)
    keys = live.submit([ask([n + 2] * 300, n=1500) for n in range(4)])
    live.wait(keys, lambda r: len(r.tokens) > 2)
    least = 4 * 300 / replica.info.kv_tokens
    assert soon(lambda: least <= replica.kv_usage < 1)
    for key in keys:
        live.cancel(key)
    assert {r.finish for r in live.results(keys)} == {Finish.CANCELLED}
    assert soon(lambda: replica.kv_usage == 0), "an abort frees blocks between two steps"


def test_a_step_is_told_while_it_lasts(live: Live) -> None:
    before = live.replica.beats
    keys = live.submit([ask(range(2, 1900), n=3)])
    assert soon(lambda: live.replica.step_since_ns > 0)
    assert len(live.results(keys)[0].tokens) == 3
    assert soon(lambda: live.replica.step_since_ns == 0)
    assert live.replica.beats >= before + 3


def test_what_is_only_cached_counts_as_free(live: Live) -> None:
    live.generate(ask(range(2, 1000), n=4))
    assert soon(lambda: live.replica.kv_usage == 0)


def test_the_warning_of_a_scheduler_that_is_ours_is_not_shown(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    live.generate(ask(n=2))
    assert not [r for r in caplog.get_records("setup") if "custom scheduler" in r.message and r.levelname == "WARNING"]
