"""Blocks of the paged KV cache: who holds which, what they contain, which may be reused. Pure Python.

A block holds the keys and values of `block_size` consecutive positions, in all layers. A full block is known by the
hash of everything up to its end, so that a later request with the same beginning can share it. Free blocks keep their
content until they are needed: the least recently used one goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

#: Starts every chain of hashes; blake2b, because a tenant must not be able to construct a collision.
_SEED = b"evap kv 1"


def root_hash(salt: str) -> bytes:
    """The hash before the first block. Requests share blocks only if their salts are equal."""
    return hashlib.blake2b(_SEED + salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def chain_hash(parent: bytes, tokens: Sequence[int], variant: int = 0) -> bytes:
    """The hash of a full block: of its tokens, of all that precedes it, and of how its positions were rotated."""
    data = array("i", tokens).tobytes() + variant.to_bytes(8, "little")
    return hashlib.blake2b(data, key=parent, digest_size=16).digest()


class BlockPool:
    """`count` blocks with reference counts. A block is free (count 0), or held by one or more sequences."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self._refs = [0] * count
        self._hash: list[bytes | None] = [None] * count
        self._by_hash: dict[bytes, int] = {}
        # Order of reuse, first to last. Values are unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))

    @property
    def free(self) -> int:
        """Blocks that `allocate` can give out now."""
        return len(self._free)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of `hashes`. They are not held yet."""
        found: list[int] = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are free at present (holding them takes that many from `free`)."""
        return sum(1 for block in blocks if self._refs[block] == 0)

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference to each."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def allocate(self, count: int, after: int = -1) -> list[int]:
        """`count` blocks with undefined content, one reference each; the caller has checked `free`.

        `after` is the block that they will follow. Its neighbour is taken if it is free and holds nothing worth
        keeping: attention reads consecutive blocks in place and has to gather others.
        """
        taken: list[int] = []
        for _ in range(count):
            near = after + 1
            if after >= 0 and near in self._free and self._hash[near] is None:
                del self._free[near]
                block = near
            else:
                block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
            after = block
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each of a sequence's blocks, in order of position.

        The end of a sequence is reused before its beginning, which more requests can share.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes) -> None:
        """The content of a held block is complete. Of blocks with the same content, the first stays the known one."""
        if self._hash[block] is None and digest not in self._by_hash:
            self._hash[block] = digest
            self._by_hash[digest] = block

    def _forget(self, block: int) -> None:
        digest = self._hash[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hash[block] = None
