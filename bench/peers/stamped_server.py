"""evap with a clock beside each engine step: when the step came (before any of our work) and when its bytes were out.

Stamps are CLOCK_MONOTONIC nanoseconds, (step, written, tokens) as three int64 a step, appended to the file of the first
argument at the end. The other arguments are those of `evap serve`.
"""

from __future__ import annotations

import sys
import time
from array import array

from evap.__main__ import main
from evap.messages import TokenBatch
from evap.steps import Steps

STAMPS = array("q")
_on_batch = Steps.on_batch


def on_batch(self: Steps, batch: TokenBatch) -> None:
    start = time.monotonic_ns()
    _on_batch(self, batch)
    STAMPS.extend((start, time.monotonic_ns(), len(batch)))


if __name__ == "__main__":
    Steps.on_batch = on_batch  # type: ignore[method-assign]
    code = main(["serve", *sys.argv[2:]])
    with open(sys.argv[1], "wb") as out:
        STAMPS.tofile(out)
    sys.exit(code)
