from __future__ import annotations

import torch

from evap.engine.torch.plan import Lane, Planner, order

PLANNER = Planner(4, torch.device("cpu"), torch.float32)


def test_decoding_comes_first_and_short_before_long() -> None:
    lanes = [Lane([0], 0, 3), Lane([1, 2], 7, 1), Lane([3], 2, 1)]
    assert order(lanes) == [2, 1, 0]


def test_places_follow_the_block_table() -> None:
    plan = PLANNER.plan([Lane([7], 2, 1), Lane([5, 1, 9], 3, 6)])
    assert plan.positions.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert plan.places.tolist() == [30, 23, 4, 5, 6, 7, 36]


def test_consecutive_blocks_are_read_in_place_others_gathered() -> None:
    (group,) = PLANNER.plan([Lane([3, 4, 5], 9, 1)]).decodes
    assert (group.pages.first, group.pages.blocks, group.pages.length, group.mask) == (12, None, 10, None)
    (group,) = PLANNER.plan([Lane([3, 5, 4], 9, 1)]).decodes
    assert group.pages.blocks is not None
    assert group.pages.blocks.tolist() == [3, 5, 4]
    assert group.pages.length == 10


def test_a_group_is_padded_and_masked() -> None:
    (group,) = PLANNER.plan([Lane([1], 1, 1), Lane([8, 2], 5, 1)]).decodes
    assert group.pages.blocks is not None
    assert group.pages.blocks.tolist() == [1, 0, 8, 2]
    assert group.mask is not None
    assert group.mask.shape == (2, 1, 1, 8)
    assert (group.mask == 0).sum(-1).flatten().tolist() == [2, 6]


def test_equal_lengths_that_fill_their_blocks_need_no_mask() -> None:
    (group,) = PLANNER.plan([Lane([1], 3, 1), Lane([8], 3, 1)]).decodes
    assert group.mask is None


def test_one_long_sequence_does_not_pad_the_short_ones() -> None:
    long = Lane(list(range(100, 1100)), 3999, 1)
    groups = PLANNER.plan([Lane([1], 1, 1), Lane([2], 2, 1), long]).decodes
    assert [(group.begin, group.end) for group in groups] == [(0, 2), (2, 3)]


def test_a_later_chunk_sees_its_past_and_no_future() -> None:
    first, second = PLANNER.plan([Lane([0], 0, 3), Lane([5, 6], 4, 3)]).prefills
    assert first.mask is None  # causal from the start
    assert second.mask is not None
    assert (second.mask == 0).tolist() == [[True] * (5 + row) + [False] * (2 - row) for row in range(3)]
