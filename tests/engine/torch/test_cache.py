from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evap.engine.torch.cache import BlockPool, chain_hash, root_hash


def chain(tokens: list[int], size: int = 4, salt: str = "") -> list[bytes]:
    hashes, parent = [], root_hash(salt)
    for start in range(0, len(tokens) - size + 1, size):
        parent = chain_hash(parent, tokens[start : start + size])
        hashes.append(parent)
    return hashes


def test_a_hash_stands_for_everything_before_it_and_for_the_salt() -> None:
    a, b = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[1] != b[1]
    assert a == chain([1, 2, 3, 4, 5, 6, 7, 8])
    assert a != chain([1, 2, 3, 4, 5, 6, 7, 8], salt="another tenant")
    assert chain_hash(a[0], [5, 6, 7, 8], variant=4096) != a[1]


def test_published_blocks_are_found_again_after_release() -> None:
    pool = BlockPool(8, 4)
    hashes = chain(list(range(12)))
    blocks = pool.allocate(3)
    for block, digest in zip(blocks, hashes, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert pool.free == 8
    assert pool.lookup(hashes) == blocks
    assert pool.lookup([b"unknown", *hashes]) == []


def test_content_is_kept_as_long_as_other_blocks_are_free_and_the_end_goes_first() -> None:
    pool = BlockPool(4, 4)
    hashes = chain(list(range(8)))
    blocks = pool.allocate(2)
    for block, digest in zip(blocks, hashes, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    others = pool.allocate(2)
    assert not set(others) & set(blocks)
    pool.allocate(1)
    assert pool.lookup(hashes) == blocks[:1]


def test_a_block_held_twice_is_free_after_two_releases() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.hold([block])
    pool.release([block])
    assert pool.free == 1
    pool.release([block])
    assert pool.free == 2


def test_a_sequence_gets_neighbours_when_it_can() -> None:
    pool = BlockPool(16, 4)
    first = pool.allocate(2)
    pool.allocate(1)  # takes the neighbour
    assert pool.allocate(1, after=first[-1]) != [first[-1] + 1]
    pool = BlockPool(16, 4)
    assert pool.allocate(3, after=7) == [8, 9, 10]


def test_a_cached_neighbour_is_not_sacrificed() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.publish(blocks[1], b"kept")
    pool.release([blocks[1]])
    assert pool.allocate(1, after=blocks[0]) != [blocks[1]]
    assert pool.lookup([b"kept"]) == [blocks[1]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3)), max_size=60))
def test_books_balance_whatever_happens(actions: list[tuple[int, int, int]]) -> None:
    pool = BlockPool(8, 2)
    held: list[list[int]] = []
    for kind, count, which in actions:
        if kind == 0 and pool.free >= count:
            blocks = pool.allocate(count)
            assert len(set(blocks)) == count
            assert not any(set(blocks) & set(others) for others in held)
            held.append(blocks)
        elif kind == 1 and held:
            pool.release(held.pop(which % len(held)))
        elif kind == 2 and held:
            blocks = held[which % len(held)]
            pool.publish(blocks[0], bytes([which]))
        elif kind == 3 and (found := pool.lookup([bytes([which])])):
            pool.hold(found)
            held.append(found)
        assert pool.free == 8 - len({block for blocks in held for block in blocks})
