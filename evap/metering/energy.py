"""Who used a GPU's energy: windows of about a second, divided among the exchanges that were computed in them.

An estimate, and named so: a window's energy is the whole board's, and it is divided by tokens processed (those of a
prompt that were not cached, once its exchange has its first token, and those that were sampled). What is given out in a
window sums to the window's energy exactly; a window in which nothing was processed belongs to nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from evap.messages import Usage
from evap.metering.nvml import Window, apportion, open_sampler
from evap.metering.record import Record

#: Exchanges that are settled and may still be asked about.
KEPT: Final = 10_000


class Sampler(Protocol):
    def sample(self, now_ns: int) -> Window | None: ...
    def close(self) -> None: ...


def processed(usage: Usage | Record) -> int:
    """Tokens that the engine has worked on."""
    return usage.computed + usage.prompt - usage.cached if usage.computed else 0


class Energy:
    """Called from the loop: `settled` with every record, `tick` about once a second."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._seen: dict[str, int] = {}  # of running exchanges: tokens in windows that are over
        self._ended: list[tuple[str, int]] = []  # in this window: tokens since the last
        self._mj: dict[str, int] = {}
        self._order: deque[str] = deque()
        self.total_mj = 0  #: of all windows
        self.idle_mj = 0  #: of those in which nothing was processed
        self.utilisation: dict[str, float] = {}  #: of the last window, per cent; see nvml.py

    def of(self, id: str) -> int:
        """mJ that an exchange is estimated to have used in the windows that are over."""
        return self._mj.get(id, 0)

    def settled(self, records: Sequence[Record]) -> None:
        self._ended += [(r.id, processed(r) - self._seen.pop(r.id, 0)) for r in records]

    def tick(self, now_ns: int, running: Iterable[tuple[str, Usage]]) -> None:
        """running: id and counts of every exchange that is not settled."""
        window = self._sampler.sample(now_ns)
        if window is None:
            return
        ended, self._ended = self._ended, []
        shares = ended
        for id, usage in running:
            total = processed(usage)
            shares.append((id, total - self._seen.get(id, 0)))
            self._seen[id] = total
        self.utilisation = window.utilisation_estimated
        self._give(window.energy_mj_estimated or 0, [(id, tokens) for id, tokens in shares if tokens > 0])

    def _give(self, energy_mj: int, shares: Sequence[tuple[str, int]]) -> None:
        self.total_mj += energy_mj
        if not shares:
            self.idle_mj += energy_mj
        for (id, _), part in zip(shares, apportion(energy_mj, [tokens for _, tokens in shares]), strict=True):
            if id not in self._mj:
                self._order.append(id)
                if len(self._order) > KEPT:
                    self._mj.pop(self._order.popleft(), None)
            self._mj[id] = self._mj.get(id, 0) + part

    def stop(self) -> None:
        self._sampler.close()


def open_energy() -> Energy | None:
    """Of the first GPU; None without NVML or without one."""
    sampler = open_sampler()
    return Energy(sampler) if sampler is not None else None
