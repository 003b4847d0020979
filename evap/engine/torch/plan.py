"""How a step's tokens lie, and where in the cache: built once per step on the host, used by every layer.

The tokens of a step lie in this order: first the decoding sequences, one token each, shortest first, in groups of
similar length; then the chunks of prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: A group's longest sequence may be this many times its shortest: what padding may waste.
_SPREAD = 2.0
#: Sequences below this length are padded together whatever their spread.
_SHORT = 256


@dataclass(frozen=True, slots=True)
class Lane:
    """What one sequence computes in a step: positions start .. start + count - 1; `blocks` cover them."""

    blocks: Sequence[int]
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the KV of one or more sequences is: `first` position in the flat cache if in one piece, else block ids."""

    first: int
    blocks: Tensor | None  # (sequences * pages,)
    length: int


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with rows `begin`..`end` of the step that are attended to in one call; mask is additive or None."""

    begin: int
    end: int
    pages: Pages
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the layers need to know of a step; built once per step."""

    positions: Tensor  # int64 (tokens,)
    places: Tensor  # int64 (tokens,): flat cache positions to write to
    decodes: list[Group]
    prefills: list[Group]


def order(lanes: Sequence[Lane]) -> list[int]:
    """Indices of `lanes` in the order in which their tokens must lie in the step."""
    return sorted(range(len(lanes)), key=lambda i: (lanes[i].count > 1, lanes[i].start))


class Planner:
    """Plans for one cache. Lanes are in `order` already."""

    def __init__(self, block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._size = block_size
        self._device = device
        self._dtype = dtype

    def plan(self, lanes: Sequence[Lane]) -> Plan:
        positions = np.concatenate([np.arange(lane.start, lane.start + lane.count) for lane in lanes])
        places = np.concatenate([self._places(lane) for lane in lanes])
        single = sum(lane.count == 1 for lane in lanes)
        decodes = [self._decode(lanes, begin, end) for begin, end in _groups(lanes[:single])]
        prefills: list[Group] = []
        row = single
        for lane in lanes[single:]:
            pages = self._pages([lane], lane.start + lane.count)
            prefills.append(Group(row, row + lane.count, pages, self._causal(lane) if lane.start else None))
            row += lane.count
        return Plan(self._tensor(positions), self._tensor(places), decodes, prefills)

    def _tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _places(self, lane: Lane) -> npt.NDArray[np.int64]:
        first, last = lane.start // self._size, (lane.start + lane.count - 1) // self._size
        blocks = np.asarray(lane.blocks[first : last + 1], np.int64)
        flat = (blocks[:, None] * self._size + np.arange(self._size)).reshape(-1)
        offset = lane.start - first * self._size
        return flat[offset : offset + lane.count]

    def _decode(self, lanes: Sequence[Lane], begin: int, end: int) -> Group:
        lengths = [lane.start + 1 for lane in lanes[begin:end]]
        pages = self._pages(lanes[begin:end], lengths[-1])
        mask = None
        if lengths[0] != pages.length:
            row = np.where(np.arange(pages.length) < np.asarray(lengths)[:, None], 0.0, -np.inf).astype(np.float32)
            mask = torch.from_numpy(row).to(self._device, self._dtype)[:, None, None, :]
        return Group(begin, end, pages, mask)

    def _pages(self, lanes: Sequence[Lane], length: int) -> Pages:
        """Pages of `lanes`, padded to `length` positions (to whole blocks when several are gathered)."""
        count = -(-length // self._size)
        if len(lanes) == 1:
            blocks = np.asarray(lanes[0].blocks[:count], np.int64)
            if (np.diff(blocks) == 1).all():
                return Pages(int(blocks[0]) * self._size, None, length)
            return Pages(-1, self._tensor(blocks), length)
        table = np.zeros((len(lanes), count), np.int64)
        for row, lane in enumerate(lanes):
            own = lane.blocks[:count]
            table[row, : len(own)] = own
        return Pages(-1, self._tensor(table.reshape(-1)), count * self._size)

    def _causal(self, lane: Lane) -> Tensor:
        """(count, start + count): the row of position p sees positions 0..p."""
        shape = (lane.count, lane.start + lane.count)
        mask = torch.full(shape, float("-inf"), device=self._device, dtype=self._dtype)
        return mask.triu_(lane.start + 1)


def _groups(lanes: Sequence[Lane]) -> list[tuple[int, int]]:
    """Cut decoding lanes, sorted by length, where padding would waste too much."""
    cuts: list[tuple[int, int]] = []
    begin = 0
    for i in range(1, len(lanes) + 1):
        if i == len(lanes) or lanes[i].start > max(_SHORT, _SPREAD * lanes[begin].start):
            cuts.append((begin, i))
            begin = i
    return cuts if lanes else []
