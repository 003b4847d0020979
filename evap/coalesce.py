"""`--coalesce-ms`: engine steps held for a moment, so that several tokens go out in one write.

For many connections with one stream each, the system call is what a token costs; a few milliseconds of latency buy most
of it back. Off by default. Each token remains an event of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evap.messages import TokenBatch


class Coalescer:
    """Stands before `Steps.on_batch`. A batch with anything but plain tokens goes on at once, after what was held."""

    def __init__(
        self,
        period_s: float,
        on_batch: Callable[[TokenBatch], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._period_s = period_s
        self._on_batch = on_batch
        self._call_later = call_later
        self._held: list[TokenBatch] = []
        self._timed = False

    def on_batch(self, batch: TokenBatch) -> None:
        self._held.append(batch)
        if batch.flags.any():
            self._release()
        elif not self._timed:
            self._timed = True
            self._call_later(self._period_s, self._due)

    def _due(self) -> None:
        self._timed = False
        if self._held:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, []
        self._on_batch(joined(held))


def joined(batches: list[TokenBatch]) -> TokenBatch:
    """One batch with the records of all, in order; the entries of `logprobs` keep their records."""
    if len(batches) == 1:
        return batches[0]
    entries, start = {}, 0
    for batch in batches:
        for number, entry in batch.logprobs.items():
            entries[start + number] = entry
        start += len(batch)
    return TokenBatch(
        np.concatenate([b.slot for b in batches]),
        np.concatenate([b.generation for b in batches]),
        np.concatenate([b.token for b in batches]),
        np.concatenate([b.index for b in batches]),
        np.concatenate([b.flags for b in batches]),
        batches[-1].step,
        entries,
    )
