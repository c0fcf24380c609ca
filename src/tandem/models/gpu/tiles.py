"""Queries that exact attention on a GPU computes together (`exact.py`). Needs no Triton."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LEAST_ROWS = 16  # of a tile: a matrix unit takes no fewer


@dataclass(frozen=True)
class Tiles:
    """Consecutive tokens of one sequence each. One entry a tile, but for the table."""

    table: Tensor  # the blocks of all sequences, list after list; of packed sequences a block is one token
    starts: Tensor  # where in the table the list of its sequence begins
    tokens: Tensor  # its first query
    seen: Tensor  # how many tokens that one sees, itself included
    counts: Tensor  # of queries


def tokens_per_tile(num_heads: int, num_kv_heads: int) -> int:
    """The query heads that share a KV head are further rows of a tile."""
    return max(1, LEAST_ROWS * num_kv_heads // num_heads)


def cut(lengths: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sequences cut into tiles of at most `size` tokens: whose each tile is, and where in it the tile begins."""
    num_tiles = -(-lengths // size)
    owner = np.repeat(np.arange(len(lengths)), num_tiles)
    return owner, (np.arange(len(owner)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)) * size
