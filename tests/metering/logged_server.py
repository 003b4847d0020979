"""evap with an engine that keeps a log of its own: `python -m tests.metering.logged_server LOG serve ...`.

Each batch is appended to LOG, as one line of {exchange id: tokens}, before the loop sees it. A line that a killed
process wrote last may be of a batch that the loop did not see any more.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

from evap.__main__ import main
from evap.dispatch import Dispatch
from evap.engine.interface import OnBatch
from evap.engine.synthetic import SyntheticReplica
from evap.messages import META, NO_TOKEN, TokenBatch


def install(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    houses: list[Dispatch] = []
    made = Dispatch.__init__
    listen = SyntheticReplica.listen

    def remember(self: Dispatch, *args: object, **named: object) -> None:
        made(self, *args, **named)  # type: ignore[arg-type]
        houses.append(self)

    def logged(self: SyntheticReplica, on_batch: OnBatch, on_state: object) -> None:
        def log_first(batch: TokenBatch) -> None:
            owner = houses[0].steps.slots.owner
            counts: Counter[str] = Counter()
            for slot, flags in zip(batch.slot.tolist(), batch.flags.tolist(), strict=True):
                choice = owner[slot]
                if choice is not None and not flags & (NO_TOKEN | META):
                    counts[choice.exchange.renderer.id] += 1
            if counts:
                os.write(fd, json.dumps(counts).encode() + b"\n")
            on_batch(batch)

        listen(self, log_first, on_state)  # type: ignore[arg-type]

    Dispatch.__init__ = remember  # type: ignore[method-assign]
    SyntheticReplica.listen = logged  # type: ignore[method-assign]


if __name__ == "__main__":
    install(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
