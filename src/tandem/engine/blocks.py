"""The KV cache's blocks: which are free, how many sequences hold each of the others, and which ones hold a
prefix that may be met again. No torch.

    allocate ─► held ─────── release ──────► free (a stack)
                 ▲  │ keep_as(key)              ▲ evicted, oldest first, when the stack is empty
                 │  └─ release ─► cached ───────┘
                 └──── take(find(keys)) ──┘

A full block is known by a key that stands for all tokens from the first one to its last.
"""

from collections import OrderedDict
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int64]
Key = bytes


def block_keys(tokens: NDArray[np.int64], block_size: int, previous: Key) -> list[Key]:
    """A key for each full block of `tokens`, which follow what `previous` stands for."""
    data, step = tokens.tobytes(), block_size * tokens.itemsize
    keys = []
    for start in range(0, len(data) - step + 1, step):
        previous = blake2b(data[start : start + step], key=previous, digest_size=16).digest()
        keys.append(previous)
    return keys


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = np.zeros(num_blocks, np.int64)
        # A stack: blocks given back last are handed out first, while they are still in the CPU's cache.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._num_stacked = num_blocks
        self._by_key: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._has_key = np.zeros(num_blocks, np.bool_)
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and held by no row, oldest first

    @property
    def num_free(self) -> int:
        """Blocks that may be allocated, those included that only cache something."""
        return self._num_stacked + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> BlockIds:
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        while self._num_stacked < count:
            self._evict_oldest()
        blocks = self._free[self._num_stacked - count : self._num_stacked][::-1].copy()
        self._num_stacked -= count
        self._holders[blocks] = 1
        return blocks

    def find(self, keys: list[Key]) -> BlockIds:
        """The cached blocks of the longest known prefix."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return np.array(found, np.int64)

    def num_idle(self, blocks: BlockIds) -> int:
        """How many of these blocks are counted as free."""
        return int((self._holders[blocks] == 0).sum())

    def share(self, blocks: BlockIds, holders: int = 1) -> None:
        """Count `holders` more sequences on each of these blocks, which are held or cached."""
        for block in blocks[self._holders[blocks] == 0].tolist():
            del self._idle[block]
        self._holders[blocks] += holders

    def keep_as(self, blocks: BlockIds, keys: list[Key]) -> None:
        """These held blocks are computed: whoever comes with the same prefix may share them."""
        for block, key in zip(blocks.tolist(), keys, strict=True):
            if key not in self._by_key and block not in self._key_of:
                self._by_key[key] = block
                self._key_of[block] = key
                self._has_key[block] = True

    def release(self, blocks: BlockIds) -> None:
        """One holder of each block lets go; blocks without holders become free, or idle if they cache something."""
        assert (self._holders[blocks] > 0).all(), "a free block was released"
        self._holders[blocks] -= 1
        freed = blocks[self._holders[blocks] == 0]
        cached = self._has_key[freed]
        if cached.any():
            # Backwards: the end of a prefix is worth less than its beginning, and must be evicted first.
            self._idle.update(dict.fromkeys(reversed(freed[cached].tolist())))
            freed = freed[~cached]
        self._push(freed)

    def forget(self) -> None:
        """Nothing that is cached is true any more."""
        self._push(np.array(list(self._idle), np.int64))
        self._idle.clear()
        self._by_key.clear()
        self._key_of.clear()
        self._has_key[:] = False

    def check_invariants(self, held: list[BlockIds]) -> None:
        """`held` is what every sequence holds: counts must match it, and the rest must be free or idle, once."""
        expected = np.zeros(self.num_blocks, np.int64)
        for blocks in held:
            assert len(set(blocks.tolist())) == len(blocks), "a sequence holds a block twice"
            expected[blocks] += 1
        assert (self._holders == expected).all(), "holder counts differ from the block tables"
        free = [*self._free[: self._num_stacked].tolist(), *self._idle]
        assert sorted(free) == np.flatnonzero(expected == 0).tolist(), "the free list is wrong"
        assert {key: block for block, key in self._key_of.items()} == self._by_key, "keys and blocks differ"
        assert np.flatnonzero(self._has_key).tolist() == sorted(self._key_of), "a cached block is not marked"
        assert set(self._idle) <= set(self._key_of), "an idle block caches nothing"

    def _evict_oldest(self) -> None:
        block, _ = self._idle.popitem(last=False)
        del self._by_key[self._key_of.pop(block)]
        self._has_key[block] = False
        self._push(np.array([block], np.int64))

    def _push(self, blocks: BlockIds) -> None:
        self._free[self._num_stacked : self._num_stacked + len(blocks)] = blocks
        self._num_stacked += len(blocks)
