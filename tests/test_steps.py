"""What a batch does to running choices: late and odd records hurt nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evap.engine.synthetic_text import EOS
from evap.messages import META, NO_TOKEN, SILENT, Finish, TokenBatch
from evap.metering.counters import Counters
from evap.metering.writer import Join, NumpyMeter
from tests.fakes import FakeReply
from tests.test_dispatch import House


class Quiet(House):
    """A house whose engine never makes a token by itself: the tests are the engine."""

    def __init__(self) -> None:
        super().__init__(synthetic_ttft_ms=1e9)
        self.steps = self.dispatch.steps

    def open(self, **fields: Any) -> tuple[FakeReply, int, int]:
        reply = self.ask(**{"stream": True, "max_tokens": 50, **fields})
        choice = next(c for c in self.steps.slots.owner if c is not None and c.exchange.reply is reply)
        return reply, choice.slot, choice.generation

    def batch(self, *records: tuple[int, int, int, int, int]) -> None:
        """(slot, generation, token, index, flags) each."""
        columns = [np.array(column, np.int32) for column in zip(*records, strict=True)]
        slot, generation, token, index, flags = columns
        self.steps.on_batch(TokenBatch(slot, generation, token, index, flags.astype(np.uint8)))


A, B = ord("A"), ord("B")  # one token a byte


def test_records_of_an_earlier_user_are_dropped() -> None:
    house = Quiet()
    reply, slot, generation = house.open()
    house.batch((slot, (generation + 1) % 65_536, A, 0, 0), (slot, generation, B, 0, 0))
    assert reply.text() == "B"


def test_records_of_a_free_slot_are_dropped() -> None:
    house = Quiet()
    reply, slot, generation = house.open()
    house.batch((slot, generation, A, 0, Finish.LENGTH))
    house.batch((slot, generation, B, 1, 0), (slot, generation + 1, B, 1, Finish.STOP))
    assert reply.text() == "A"
    assert reply.reasons() == [(0, "length")]
    assert len(house.settled) == 1


def test_several_tokens_of_a_stream_in_one_batch_keep_their_order() -> None:
    house = Quiet()
    reply, slot, generation = house.open()
    word = "in order"
    house.batch(*((slot, generation, ord(c), i, 0) for i, c in enumerate(word)))
    assert reply.text() == word
    assert house.steps.rows.delivered(slot) == len(word)


def test_streams_of_ids_beside_streams_of_text_keep_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept: application/vnd.evap.tokens. A plan is made when a slot joins or leaves, not for each step."""
    house = Quiet()
    ids = {"accept": "application/vnd.evap.tokens"}
    opened = [house.open(headers=ids if n % 3 == 1 else {}) for n in range(6)]
    made: list[int] = []
    make = house.steps.rows._make

    def counted(slots: Any) -> Any:
        made.append(len(slots))
        return make(slots)

    monkeypatch.setattr(house.steps.rows, "_make", counted)
    for step in range(20):
        house.batch(*((slot, generation, A + n, step, 0) for n, (_, slot, generation) in enumerate(opened)))
    assert made == [6], "one plan, for all of them"
    house.batch(*((slot, generation, B, 20, 0) for _, slot, generation in opened[1:]))
    assert len(made) == 2, "another batch is another plan"
    for n, (reply, slot, _) in enumerate(opened):
        tokens = [A + n] * 20 + [B] * bool(n)
        if n % 3 == 1:
            assert reply.body == np.array(tokens, "<u4").tobytes()
        else:
            assert reply.text() == bytes(tokens).decode()
        assert house.steps.rows.delivered(slot) == len(tokens)


def test_the_end_token_counts_and_is_not_text() -> None:
    house = Quiet()
    reply, slot, generation = house.open()
    house.batch((slot, generation, A, 0, 0))
    house.batch((slot, generation, EOS, 1, SILENT | Finish.STOP))
    house.loop.run(1.0)
    assert reply.text() == "A"
    usage = house.usage(reply)
    assert usage.computed == usage.emitted == usage.delivered == 2


def test_cached_prompt_tokens_are_reported() -> None:
    house = Quiet()
    reply, slot, generation = house.open()
    house.batch((slot, generation, 7, 0, META | NO_TOKEN), (slot, generation, A, 0, 0))
    house.batch((slot, generation, 0, 0, NO_TOKEN | Finish.STOP))
    house.loop.run(1.0)
    assert house.usage(reply).cached == 7
    assert house.usage(reply).computed == 1


def test_ids_beyond_the_tokenizers_vocabulary_take_the_slow_path() -> None:
    house = Quiet()
    house.steps.grow(house.dispatch.text.vocab_size + 64)
    padded = house.dispatch.text.vocab_size + 63
    assert not house.steps._fast[padded]
    assert house.steps._fast[A]


@pytest.mark.parametrize("finish", [Finish.CANCELLED, Finish.ERROR])
def test_an_engine_that_gives_up_is_an_error(finish: Finish) -> None:
    house = Quiet()
    reply, slot, generation = house.open()
    house.batch((slot, generation, 0, 0, NO_TOKEN | finish))
    house.loop.run(1.0)
    assert reply.events[-2]["error"]["code"] == "engine_failed"
    assert house.dispatch.steps.slots.free == 256


SPLIT = "삼겹살👩‍👩‍👧ď".encode()


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(0, 3))
def test_characters_split_over_tokens_and_batches(cuts: list[int], others: int) -> None:
    """Each byte is a token; batches of any size, with other streams between. Byte-exact, and no U+FFFD."""
    house = Quiet()
    streams = [house.open() for _ in range(others + 1)]
    reply, slot, generation = streams[0]
    at = 0
    for cut in [*cuts, len(SPLIT)]:
        part = SPLIT[at : at + cut]
        records = [(slot, generation, byte, at + i, 0) for i, byte in enumerate(part)]
        records += [(s, g, A, 0, 0) for _, s, g in streams[1:]] if not at else []
        at += len(part)
        if records:
            house.batch(*records)
    house.batch((slot, generation, 0, 0, NO_TOKEN | Finish.STOP))
    assert reply.text() == SPLIT.decode()


# The engine's last word


def stopped(house: Quiet, **headers: str) -> tuple[FakeReply, int, int]:
    """A stream that a stop string has ended; the engine has not heard of it yet."""
    reply, slot, generation = house.open(headers=headers, stop=["B"])
    house.batch((slot, generation, A, 0, 0))
    house.batch((slot, generation, B, 1, 0))
    assert reply.events[-1] == "[DONE]"
    return reply, slot, generation


def test_trailers_say_what_the_record_says() -> None:
    """The engine computes a token more before it hears of the stop: the stream's end waits for its last word."""
    house = Quiet()
    reply, slot, generation = stopped(house, te="trailers")
    assert not reply.ended
    assert house.dispatch.ending
    house.batch((slot, generation, A, 2, 0), (slot, generation, 0, 3, Finish.CANCELLED | NO_TOKEN))
    assert reply.ended
    usage = house.usage(reply)
    assert (usage.computed, usage.emitted, usage.delivered) == (3, 2, 2)
    assert (reply.trailers[b"evap-usage-computed"], reply.trailers[b"evap-usage-emitted"]) == (b"3", b"2")
    assert not house.dispatch.ending


def test_who_takes_no_trailers_does_not_wait() -> None:
    house = Quiet()
    reply, _, _ = stopped(house)
    assert reply.ended


def test_an_engine_that_says_nothing_is_not_waited_for_long() -> None:
    house = Quiet()
    reply, slot, generation = stopped(house, te="trailers")
    house.dispatch.upkeep.overdue()
    assert not reply.ended
    house.dispatch.upkeep.overdue()
    assert reply.ended
    assert reply.trailers[b"evap-usage-computed"] == b"2"
    house.batch((slot, generation, 0, 2, Finish.CANCELLED | NO_TOKEN))
    assert len(house.settled) == 1


def test_a_reset_while_the_end_waits() -> None:
    house = Quiet()
    reply, slot, generation = stopped(house, te="trailers")
    house.dispatch.cancelled(reply, "client_reset")
    house.batch((slot, generation, 0, 2, Finish.CANCELLED | NO_TOKEN))
    house.dispatch.upkeep.overdue()
    assert house.end(reply) == "client_reset"
    assert not reply.ended
    assert not house.dispatch.ending


def test_the_engine_s_own_count_is_the_account() -> None:
    """An engine that died had sampled more than came: computed says so, emitted and delivered do not."""
    house = Quiet()
    pages = Counters(256, 1, None, ahead=False, now_ns=0, unix_ns=0)
    house.steps._pages = pages
    meter = NumpyMeter(pages._memories[0])
    reply, slot, generation = house.open()
    meter.begin([Join(slot, generation, 3)], 0)
    for step in range(3):
        meter.step(np.array([slot], np.int32), np.array([[A]], np.int32), None, (step + 1) * 1_000_000, ring=False)
    house.batch((slot, generation, A, 0, 0))
    (exchange,) = house.dispatch.open
    house.steps.counts(exchange)
    assert (exchange.usage().computed, exchange.usage().emitted) == (3, 1), "while it runs, too"
    house.batch((slot, generation, 0, 1, Finish.ERROR | NO_TOKEN))
    usage, ticket = house.usage(reply), exchange.account
    assert (usage.computed, usage.emitted, usage.delivered) == (3, 1, 1)
    assert (ticket.steps, ticket.first_ns, ticket.last_ns) == (3, 1_000_000, 3_000_000)
    assert pages.mismatches == 0
