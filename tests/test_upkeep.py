"""What time makes of open exchanges. Deadlines and the wait for a first token are in test_waiting.py."""

from __future__ import annotations

from tests.test_dispatch import House


def test_comments_only_for_the_silent_and_only_in_streams() -> None:
    house = House()
    house.replica.hang()
    streamed, whole = house.ask(stream=True), house.ask(stream=False)
    for _ in range(3):
        house.dispatch.upkeep.tick()
    assert streamed.body.count(b": waiting") == 2, "not in the first period"
    assert not whole.body
    house.replica.resume()
    house.loop.run()
    house.dispatch.upkeep.tick()
    assert streamed.body.count(b": waiting") == 2
    assert not house.dispatch.upkeep._progress
