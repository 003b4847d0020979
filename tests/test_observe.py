"""What is said of an exchange: the same numbers to the metrics page, the log and the account."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from evap import logs, observe
from evap.config import EngineConfig
from evap.observe import Observer, watch
from evap.protocol.limits import Shared
from tests.fakes import FakeReply
from tests.metered import Metered
from tests.test_metrics import samples


class Observed(Metered):
    """With an observer in the place of the server's."""

    def __init__(self, folder: Any, **settings: Any) -> None:
        super().__init__(folder, ledger=False, **settings)
        self.observer = Observer(self.metrics, model="synthetic", now_ns=self._now_ns)
        watch(self.metrics, self.dispatch, Shared(), EngineConfig())

    def finish(self, **fields: Any) -> FakeReply:
        reply = self.ask(**fields)
        self.loop.run(10.0)
        for exchange in self.settled:
            self.observer.settled(exchange)
        self.settled.clear()
        return reply


@pytest.fixture
def house(tmp_path: Any) -> Observed:
    return Observed(tmp_path)


def test_a_whole_answer_and_a_stream_count_alike(house: Observed) -> None:
    body = json.loads(house.finish(max_tokens=9, n=2, ignore_eos=True).body)
    house.finish(max_tokens=9, n=2, ignore_eos=True, stream=True)
    got = samples(house.metrics)
    usage = body["usage"]
    assert got["evap_tokens_total", ("prompt",)] == 2 * usage["prompt_tokens"]
    assert got["evap_tokens_total", ("delivered",)] == got["vllm:generation_tokens_total", ("synthetic",)] == 36
    assert got["vllm:prompt_tokens_total", ("synthetic",)] == 2 * usage["prompt_tokens"]
    assert got["vllm:request_success_total", ("length", "synthetic")] == 4
    assert got["evap_exchanges_total", ("length",)] == 2
    assert got["evap_inter_token_seconds_count", ()] == 32, "each of four generations has 8 gaps"
    assert got["evap_inter_token_seconds_sum", ()] == pytest.approx(0.032)
    assert got["evap_time_to_first_token_seconds_count", ()] == 2
    assert got["evap_request_max_tokens_sum", ()] == 18
    assert got["evap_choice_tokens_bucket", ("5.0",)] == 0
    assert got["evap_choice_tokens_bucket", ("10.0",)] == 4
    assert got["evap_open_exchanges", ()] == got["evap_running", ()] == 0


def test_tokens_are_counted_while_a_stream_runs(house: Observed) -> None:
    house.ask(max_tokens=5000, ignore_eos=True, stream=True)
    house.loop.run(0.1)
    got = samples(house.metrics)
    assert 50 < got["evap_generated_tokens_total", ()] < 150
    assert got["evap_tokens_total", ("emitted",)] == 0
    assert got["evap_running", ()] == 1


def test_a_refused_request_reached_no_engine(house: Observed) -> None:
    reply = house.ask(max_tokens=10_000_000)
    assert reply.status == 400
    house.loop.run(1.0)
    (exchange,) = house.settled
    summary = observe.summary(exchange, house._now_ns())
    assert (summary.status, summary.reasons, summary.queue_s) == (400, [], None)
    house.metrics.settled(summary)
    assert samples(house.metrics)["evap_exchanges_total", ("refused",)] == 1


def test_the_line_has_the_numbers_of_the_account(house: Observed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evap.server")
    house.finish(max_tokens=9, ignore_eos=True, stream=True, messages=[{"role": "user", "content": "a secret"}])
    (record,) = [r for r in caplog.records if r.getMessage() == "exchange"]
    fields = getattr(record, logs.FIELDS)
    assert fields["computed_tokens"] == fields["emitted_tokens"] == fields["delivered_tokens"] == 9
    assert (fields["status"], fields["end"], fields["model"], fields["choices"]) == (200, "length", "synthetic", 1)
    assert 0 <= fields["queue_ms"] <= fields["ttft_ms"] < fields["total_ms"]
    assert "secret" not in repr(fields)
