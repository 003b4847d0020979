"""What a step publishes. Apart from the engine, so that a worker needs no torch to carry it."""

from __future__ import annotations

from dataclasses import dataclass, field

from evap.engine.torch.wire import LogprobEntry


@dataclass(slots=True)
class Records:
    """Columns of equal length, as `RingWriter.write` takes them, and the log probabilities that belong to them."""

    slot: list[int] = field(default_factory=list)
    generation: list[int] = field(default_factory=list)
    token: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.slot)

    def add(self, slot: int, generation: int, token: int, index: int, flags: int) -> None:
        self.slot.append(slot)
        self.generation.append(generation)
        self.token.append(token)
        self.index.append(index)
        self.flags.append(flags)
