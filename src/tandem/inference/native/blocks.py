"""The KV cache's blocks: which are free, and how many sequences hold each of the others. No torch."""

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int64]


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = np.zeros(num_blocks, np.int64)
        # A stack: blocks given back last are handed out first, while they are still in the CPU's cache.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self.num_free = num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> BlockIds:
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        blocks = self._free[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self._holders[blocks] = 1
        return blocks

    def share(self, blocks: BlockIds, holders: int = 1) -> None:
        """Count `holders` more sequences on each of these blocks."""
        self._holders[blocks] += holders

    def release(self, blocks: BlockIds) -> None:
        """One holder of each block lets go; blocks that nobody holds become free."""
        assert (self._holders[blocks] > 0).all(), "a free block was released"
        self._holders[blocks] -= 1
        freed = blocks[self._holders[blocks] == 0]
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def check_invariants(self, held: list[BlockIds]) -> None:
        """`held` is what every sequence holds: counts must match it, and the rest must be free, once."""
        expected = np.zeros(self.num_blocks, np.int64)
        for blocks in held:
            assert len(set(blocks.tolist())) == len(blocks), "a sequence holds a block twice"
            expected[blocks] += 1
        assert (self._holders == expected).all(), "holder counts differ from the block tables"
        free = self._free[: self.num_free]
        assert sorted(free.tolist()) == np.flatnonzero(expected == 0).tolist(), "the free list is wrong"
