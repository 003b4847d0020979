"""What is said of an exchange: the same numbers to the metrics page, the log and the account."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from evap import dispatch, logs, observe
from evap.config import EngineConfig
from evap.observe import Observer, watch
from evap.protocol import limits
from evap.protocol.limits import Shared
from tests.fakes import FakeReply
from tests.metered import Metered
from tests.test_dispatch import House
from tests.test_metrics import samples


class Observed(Metered):
    """With an observer in the place of the server's."""

    def __init__(self, folder: Any, *, log_requests: bool = True, **settings: Any) -> None:
        super().__init__(folder, ledger=False, **settings)
        self.observer = Observer(
            self.metrics, model="synthetic", now_ns=self._now_ns, wall_s=lambda: 0.0, log_requests=log_requests
        )
        watch(self.metrics, self.dispatch, Shared(), EngineConfig())

    def finish(self, **fields: Any) -> FakeReply:
        reply = self.ask(**fields)
        self.finish_all()
        return reply

    def finish_all(self) -> None:
        self.loop.run(10.0)
        for exchange in self.settled:
            self.observer.settled(exchange)
        self.settled.clear()


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


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    out, level = io.StringIO(), logging.getLogger("evap").level
    logs.configure("info", "json", out)
    yield out
    for handler in [h for h in logging.getLogger().handlers if isinstance(h, logs._Handler)]:
        logging.getLogger().removeHandler(handler)
        handler.finish()
    logging.getLogger("evap").setLevel(level)
    logging.captureWarnings(False)


def test_the_line_has_the_numbers_of_the_account(log: io.StringIO, tmp_path: Any) -> None:
    house = Observed(tmp_path)
    secret = [{"role": "user", "content": "a secret"}]
    house.finish(max_tokens=9, ignore_eos=True, stream=True, messages=secret, headers={"x-request-id": "mine"})
    logs.flush()
    line = json.loads(log.getvalue())
    assert line["computed_tokens"] == line["emitted_tokens"] == line["delivered_tokens"] == 9
    assert (line["status"], line["end"], line["model"], line["choices"]) == (200, "length", "synthetic", 1)
    assert line["request_id"] == "mine"
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] < line["total_ms"]
    assert "secret" not in log.getvalue()


def test_without_lines_for_requests_only_failures_have_one(log: io.StringIO, tmp_path: Any) -> None:
    house = Observed(tmp_path, log_requests=False)
    house.finish(max_tokens=3)
    house.ask(max_tokens=3)
    house.replica.fail("as a test")
    house.finish_all()
    logs.flush()
    (line,) = map(json.loads, log.getvalue().splitlines())
    assert (line["level"], line["status"], line["end"]) == ("warning", 500, "engine_failed")


def test_every_limit_is_counted_from_zero() -> None:
    assert Shared().limits == dict.fromkeys(limits.LIMITS, 0)
    assert House().dispatch.limits == dict.fromkeys(dispatch.LIMITS, 0)
