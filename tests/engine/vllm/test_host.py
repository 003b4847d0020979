"""One live engine, its host, and guests that come and go: who asked for what, and what becomes of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from evap.messages import EngineInfo, Finish, ReplicaState
from tests.engine.vllm.live import NEEDS_VLLM, Live, ask, config, prepare_environment

pytestmark = NEEDS_VLLM


class Party:
    """A host and as many guests as `join` is called, all on one loop: what the pipe between them does is done here."""

    def __init__(self, tiny: Path) -> None:
        from evap.engine.vllm.host import VllmHost

        prepare_environment()
        self._tiny = tiny
        self.host = Live(lambda: VllmHost(config(), tiny, 2)).start()
        self.guests: list[Live] = []

    def join(self, number: int) -> Live:
        from evap.engine.vllm.guest import VllmGuest

        loop = self.host._loop

        def hand(how: Any, info: EngineInfo, fds: Sequence[int]) -> None:
            guest.replica.attach(how, info, [os.dup(fd) for fd in fds])

        def wanted(meter: Any) -> None:
            if self.host.replica.state is ReplicaState.READY:
                self.host.replica.lead(number, meter, hand, 0.0)

        def ask_for_a_way(meter: Any) -> None:
            loop.call_soon(wanted, meter)

        guest = Live(lambda: VllmGuest(config(), self._tiny, ask_for_a_way), loop)
        self.guests.append(guest)
        return guest.start()

    def free(self) -> bool:
        """Whether the engine has blocks of nobody: vLLM refuses to forget its cache while anybody has some."""

        async def call() -> Any:
            return await self.host.replica._seam.call("reset_prefix_cache")

        return bool(self.host.await_(call()))


@pytest.fixture(scope="module")
def party(tiny: Path) -> Iterator[Party]:
    it = Party(tiny)
    yield it
    for guest in it.guests:
        guest.await_(guest.replica.stop())
    it.host.close()


def test_guests_share_an_engine_and_slots_are_their_own(party: Party) -> None:
    one, other = party.join(0), party.join(1)
    keys = one.submit([ask([n + 2, 9], n=20) for n in range(8)])
    same = other.submit([ask([n + 50, 9], n=20) for n in range(8)])
    alone = other.results(same), one.results(keys)
    together = (
        other.generate(*[ask([n + 50, 9], n=20) for n in range(8)]),
        one.generate(*[ask([n + 2, 9], n=20) for n in range(8)]),
    )
    assert [[r.tokens for r in some] for some in alone] == [[r.tokens for r in some] for some in together]
    assert alone[0][0].tokens != alone[1][0].tokens


def test_a_cancel_is_one_guests(party: Party) -> None:
    one, other = party.guests
    mine, theirs = one.submit([ask(n=1500)], 3), other.submit([ask(n=60)], 3)
    one.wait(mine, lambda r: len(r.tokens) > 1)
    one.cancel(mine[0])
    assert one.results(mine)[0].finish is Finish.CANCELLED
    (whole,) = other.results(theirs)
    assert (whole.finish, len(whole.tokens)) == (Finish.LENGTH, 60)


def test_what_a_dead_guest_had_asked_for_is_aborted_and_its_place_is_taken(party: Party) -> None:
    """It is not stopped: as after kill -9, nobody but the host says anything to the engine."""
    dead, other = party.guests
    theirs = other.submit([ask([n + 2], n=400) for n in range(4)])
    lost = dead.submit([ask([n + 9], n=1900) for n in range(32)])
    dead.wait(lost, lambda r: len(r.tokens) > 1)
    dead.do(lambda: dead.replica._seam._detach("killed"))
    party.host.do(lambda: party.host.replica.gone(0))
    assert [r.finish for r in other.results(theirs)] == [Finish.LENGTH] * 4
    assert party.free(), "the rest of 32 x 1,900 tokens would have taken a while"
    dead.await_(asyncio.to_thread(dead.replica._seam._client.shutdown))
    heir = party.join(0)
    questions = [ask([n + 2, 9], n=20) for n in range(32)]
    answers = heir.generate(*questions)  # in the very slots
    assert [r.tokens for r in answers] == [r.tokens for r in other.generate(*questions)]
    assert party.free()
