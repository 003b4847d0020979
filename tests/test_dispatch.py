"""Requests through dispatch, the synthetic engine and a fake wire: what a client would read, and what was counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from evap.app import send_error
from evap.config import Config, EngineConfig, ProtocolConfig
from evap.dispatch import Dispatch, Shell
from evap.engine.synthetic import SyntheticReplica, SyntheticText
from evap.errors import ContextOverflow, Draining, EngineUnavailable, InvalidRequest, NotFound, RateLimited
from evap.exchange import Exchange, State
from evap.messages import Usage
from evap.protocol.api.router import dialects
from evap.protocol.rows import RowTable
from tests.fakes import FakeCore, FakeLoop, FakeReply, head


class House:
    """Everything but sockets."""

    def __init__(self, **engine: Any) -> None:
        self.loop = FakeLoop()
        self.settled: list[tuple[Exchange, Usage]] = []
        self.pool: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.cancelled: list[tuple[int, int]] = []
        self.log: list[str] = []
        config = Config(
            engine=EngineConfig(**{"synthetic_step_ms": 1.0, "synthetic_tokens": 12, **engine}),
            protocol=ProtocolConfig(stream_buffer_bytes=1024),
        )
        self.replica = SyntheticReplica(config.engine, self.loop)
        self.core = FakeCore()
        self.dispatch = Dispatch(
            config, text=SyntheticText(), replica=self.replica, rows=RowTable(256), model="synthetic",
            shell=Shell(
                now_ns=lambda: int(self.loop.now * 1e9), wall_s=lambda: 1.7e9, soon=self.loop.call_soon,
                later=self.loop.call_later,
                in_pool=lambda work, back: self.pool.append((work, back)), flush=lambda: None,
                settled=lambda e: self.settled.append((e, e.usage())), log_exception=self.log.append,
                send_error=send_error,
            ),
        )  # fmt: skip
        self.dispatch.steps._cancel = self._cancel
        self.replica.listen(self.dispatch.steps.on_batch, lambda state, line: None)
        self._start()
        self._streams = iter(range(1, 100_000, 2))

    def _cancel(self, slot: int, generation: int) -> None:
        self.cancelled.append((slot, generation))
        self.replica.cancel(slot, generation)

    def _start(self) -> None:
        coroutine = self.replica.start()
        with pytest.raises(StopIteration):
            coroutine.send(None)

    def ask(self, window: int = 1 << 30, headers: dict[str, str] | None = None, **fields: Any) -> FakeReply:
        reply = FakeReply(self.core, next(self._streams), window=window)
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        self.dispatch.generate(reply, head(**headers or {}), json.dumps(body).encode(), dialects()["chat"])
        return reply

    def usage(self, reply: FakeReply) -> Usage:
        return next(u for e, u in self.settled if e.reply is reply)

    def end(self, reply: FakeReply) -> str:
        return next(e.end for e, _ in self.settled if e.reply is reply)


@pytest.fixture
def house() -> House:
    return House()


def expected(house: House, **fields: Any) -> str:
    reply = house.ask(stream=False, **fields)
    house.loop.run()
    text: str = json.loads(reply.body)["choices"][0]["message"]["content"]
    return text


def test_a_stream_is_the_whole_answer_in_pieces(house: House) -> None:
    whole = expected(house)
    reply = house.ask(stream=True, stream_options={"include_usage": True})
    assert reply.status == 200, "the head goes out before the first token"
    house.loop.run()
    assert reply.text() == whole
    assert len(whole) > 10
    events = reply.events
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert reply.reasons() == [(0, "stop")]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    usage = house.usage(reply)
    assert events[-2]["usage"]["completion_tokens"] == usage.emitted == usage.computed == usage.delivered
    assert house.dispatch.steps.slots.free == 256
    assert not house.dispatch.open
    assert not house.core.taken


def test_tokens_take_the_rows(house: House) -> None:
    reply = house.ask(stream=True, max_tokens=10)
    house.loop.run()
    exchange = house.settled[0][0]
    assert exchange.choices[0].row_delivered >= 8
    assert reply.reasons() == [(0, "length")]


@pytest.mark.parametrize("stream", [True, False])
def test_n_choices_share_one_stream(house: House, stream: bool) -> None:
    reply = house.ask(stream=stream, n=3, max_tokens=9, seed=7)
    house.loop.run()
    if stream:
        assert sorted(reply.reasons()) == [(0, "length"), (1, "length"), (2, "length")]
        assert reply.events.count("[DONE]") == 1
        texts = [reply.text(i) for i in range(3)]
    else:
        choices = json.loads(reply.body)["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2]
        texts = [c["message"]["content"] for c in choices]
    assert all(texts)
    usage = house.usage(reply)
    assert usage.computed == usage.emitted == usage.delivered == 27
    assert house.dispatch.steps.slots.free == 256


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_answer_and_the_engine(house: House, stream: bool) -> None:
    whole = expected(house, max_tokens=40, ignore_eos=True)
    stop = whole[12:15]
    reply = house.ask(stream=stream, stop=[stop], max_tokens=40, ignore_eos=True)
    house.loop.run()
    text = reply.text() if stream else json.loads(reply.body)["choices"][0]["message"]["content"]
    assert text == whole[: whole.index(stop)]
    assert house.cancelled
    usage = house.usage(reply)
    assert 0 < usage.delivered == usage.emitted <= usage.computed < 40
    assert house.end(reply) == "stop"


def test_cancel_reaches_a_silent_engine_at_once() -> None:
    house = House(synthetic_ttft_ms=60_000.0)
    replies = [house.ask(stream=True) for _ in range(10)]
    house.loop.run(1.0)
    house.dispatch.cancelled(replies[4], "client_reset")
    assert len(house.cancelled) == 1
    house.loop.run(1.0)
    assert house.end(replies[4]) == "client_reset"
    assert house.usage(replies[4]) == Usage(prompt=house.usage(replies[4]).prompt)
    house.loop.run()
    assert all(r.reasons() == [(0, "stop")] for i, r in enumerate(replies) if i != 4)


def test_an_aborted_stream_is_counted_exactly(house: House) -> None:
    reply = house.ask(stream=True, max_tokens=100, ignore_eos=True)
    while len([e for e in reply.events if e != "[DONE]" and e["choices"][0]["delta"].get("content")]) < 6:
        house.loop.run(0.001)
    sent = house.core.output[:]
    house.dispatch.cancelled(reply, "client_gone")
    house.loop.run()
    assert house.core.output == sent, "nothing is written after the client has gone"
    usage = house.usage(reply)
    assert 6 <= usage.delivered <= usage.emitted <= usage.computed < 100
    assert len(house.settled) == 1
    assert house.dispatch.steps.slots.free == 256


def test_a_client_that_leaves_during_tokenization(house: House) -> None:
    reply = house.ask(stream=True, messages=[{"role": "user", "content": "x" * 20_000}])
    assert len(house.pool) == 1
    house.dispatch.cancelled(reply, "client_gone")
    work, back = house.pool.pop()
    back(work())
    house.loop.run()
    assert house.end(reply) == "client_gone"
    assert not house.dispatch.open
    assert house.dispatch.room._tokenizing == 0


def test_a_tokenizer_that_fails_is_a_500_and_nothing_leaks(house: House) -> None:
    reply = house.ask(stream=True, messages=[{"role": "user", "content": "x" * 20_000}])
    _, back = house.pool.pop()
    back(ValueError("boom"))
    house.loop.run()
    assert reply.status == 500
    assert b"boom" not in reply.body
    assert house.log
    assert not house.dispatch.open


def test_a_slow_reader_coalesces_and_loses_nothing(house: House) -> None:
    whole = expected(house, max_tokens=900, ignore_eos=True)
    reply = house.ask(stream=True, max_tokens=900, ignore_eos=True, window=100)
    house.loop.run(0.002)
    reply.stuck = True
    house.loop.run(0.800)
    assert 0 < reply.buffered < 1024 + 600, "the budget and one event"
    running = next(iter(house.dispatch.open))
    assert running.state is State.RUNNING
    assert running.usage().delivered < 20
    assert 0 < len(running.choices[0].held) <= 256, "what is held is text, not an object for each token"
    reply.stuck, reply.buffered = False, 0
    house.core.windows[reply.stream_id] = 1 << 30
    house.dispatch.window_opened(reply)
    house.loop.run()
    assert reply.text() == whole
    assert house.settled[1][0].choices[0].row_delivered > 10, "back on rows"
    assert house.usage(reply).delivered == 900


def test_bytes_that_a_reader_never_took_are_not_delivered(house: House) -> None:
    reply = house.ask(stream=True, max_tokens=50, ignore_eos=True, window=0)
    reply.stuck = True
    house.loop.run()
    assert not house.settled, "not settled while bytes could still be delivered"
    house.dispatch.cancelled(reply, "stalled")
    house.loop.run()
    usage = house.usage(reply)
    assert (usage.computed, usage.emitted) == (50, 50)
    assert usage.delivered == 0
    assert house.end(reply) == "stalled"


def test_engine_failure_is_an_error_event_then_the_end() -> None:
    house = House(synthetic_tokens=100)
    streamed, whole = house.ask(stream=True), house.ask(stream=False)
    house.loop.run(0.010)
    house.replica.fail("fault injected by a test")
    house.loop.run(0.5)
    assert streamed.events[-1] == "[DONE]"
    assert streamed.events[-2]["error"]["code"] == "engine_failed"
    assert streamed.ended
    assert whole.status == 500
    assert json.loads(whole.body)["error"]["type"] == "server_error"
    assert [e.end for e, _ in house.settled] == ["engine_failed"] * 2
    with pytest.raises(EngineUnavailable):
        house.ask()


def test_context_overflow_names_both_numbers() -> None:
    house = House(max_model_len=50)
    reply = house.ask(max_tokens=1000)
    house.loop.run()
    assert reply.status == 400
    error = json.loads(reply.body)["error"]
    assert error["code"] == ContextOverflow.default_code
    assert error["param"] == "max_tokens"
    assert "50" in error["message"]
    assert "1000" in error["message"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"model": "other"}, NotFound), ({"max_tokens": 0}, InvalidRequest), ({"n": 500}, InvalidRequest)],
)
def test_refused_before_anything(house: House, fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        house.ask(**fields)
    assert not house.dispatch.open


def test_admission_is_bounded() -> None:
    house = House(max_running=2, max_queued_requests=3)
    for _ in range(5):
        house.ask(stream=True)
    with pytest.raises(RateLimited):
        house.ask(stream=True)
    house.loop.run()
    assert len(house.settled) == 5
    house.ask(stream=True)


def test_draining_refuses_new_and_fails_the_rest_at_the_deadline(house: House) -> None:
    reply = house.ask(stream=True, max_tokens=1000, ignore_eos=True)
    house.loop.run(0.005)
    house.dispatch.draining = True
    with pytest.raises(Draining):
        house.ask()
    house.dispatch.fail_all(Draining("the server shut down before this answer was complete"))
    house.loop.run(1.0)
    assert reply.events[-2]["error"]["code"] == "draining"
    assert reply.events[-1] == "[DONE]"
    assert not house.dispatch.open


def test_request_ids_are_echoed_and_capped(house: House) -> None:
    reply = FakeReply(house.core, 1)
    body = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
    house.dispatch.generate(reply, head(x_request_id="abc"), body, dialects()["chat"])
    assert reply.headers[b"x-request-id"] == b"abc"
    with pytest.raises(InvalidRequest):
        house.dispatch.generate(FakeReply(house.core, 3), head(x_request_id="a" * 129), body, dialects()["chat"])


def test_two_requests_with_one_id_both_complete(house: House) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
    replies = [FakeReply(house.core, 1), FakeReply(house.core, 3)]
    for reply in replies:
        house.dispatch.generate(reply, head(x_request_id="same"), body, dialects()["chat"])
    house.loop.run()
    assert all(r.reasons() == [(0, "stop")] for r in replies)
    first, second = (r.events[0]["id"] for r in replies)
    assert first != second


def test_a_silent_stream_gets_comments_that_nobody_counts() -> None:
    house = House(synthetic_ttft_ms=90_000.0)
    reply = house.ask(stream=True)
    for _ in range(3):
        house.loop.run(15.0)
        house.dispatch.upkeep.tick()
    assert reply.body.count(b": waiting\n\n") == 2
    house.loop.run()
    assert reply.reasons() == [(0, "stop")]
    assert house.usage(reply).delivered == house.usage(reply).computed


def test_text_and_tokens_instead_of_events(house: House) -> None:
    whole = expected(house)
    body = b'{"messages":[{"role":"user","content":"hello"}],"stream":true}'
    text, ids = FakeReply(house.core, 9001), FakeReply(house.core, 9003)
    house.dispatch.generate(text, head(accept="text/plain"), body, dialects()["chat"])
    house.dispatch.generate(ids, head(accept="application/vnd.evap.tokens"), body, dialects()["chat"])
    house.loop.run()
    assert text.body.decode() == whole
    numbers = [int.from_bytes(ids.body[i : i + 4], "little") for i in range(0, len(ids.body), 4)]
    assert SyntheticText().decode(numbers) == whole
    assert house.usage(ids).delivered == house.usage(ids).emitted


def test_babel_survives_rows_and_slow_path_mixed(house: House) -> None:
    """Multi-byte characters split across tokens, quotes, control characters, tokens too long for a row."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "babel: go"}],
        "max_tokens": 150,
        "ignore_eos": True,
    }
    whole = expected(house, **fields)
    reply = house.ask(stream=True, **fields)
    house.loop.run()
    assert reply.text() == whole
    assert "👨‍👩‍👧‍👦" in whole
    run = house.settled[1][0].choices[0]
    assert 0 < run.row_delivered < 150, "some tokens took the rows and some did not"
    assert house.usage(reply).delivered == 150
