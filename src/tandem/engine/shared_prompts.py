"""Which decoding rows begin with the same blocks, so that a kernel reads these once for several rows. No torch.

blocks of the rows   1 2 3 7       rows 0 – 2 share three blocks, rows 3 – 4 two
                     1 2 3 8
                     1 2 3 9
                     4 5 6
                     4 5 11
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS_AT_ONCE = 8  # that a kernel reads a prompt for

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class SharedPrompts:
    """Chunks of neighbouring rows, each with at most ROWS_AT_ONCE rows; at most half as many as there are rows."""

    num_blocks: Integers  # (rows,): how many blocks each row begins with that its chunk has in common
    first: Integers  # (chunks,): the first row
    count: Integers  # (chunks,): how many rows

    @property
    def num_saved(self) -> int:
        """Blocks that need not be read."""
        return int(self.num_blocks.sum() - self.num_blocks[self.first].sum())


def find_shared(table: Integers) -> SharedPrompts | None:
    """Of the blocks (rows, columns) of rows of which those that begin alike are neighbours. None: nothing is shared.

    Rows are linked where they have no less in common than either has with its other neighbour: a beginning that all
    requests share does not keep the samples of one request from sharing all of their prompt."""
    if not (table[1:, 0] == table[:-1, 0]).any():
        return None
    same = table[1:] == table[:-1]
    common = np.where(same.all(axis=1), table.shape[1], same.argmin(axis=1))  # of each row and the next
    around = np.pad(common, 1)
    is_linked = (common > 0) & (common >= around[:-2]) & (common >= around[2:])
    num_blocks = np.zeros(len(table), np.int64)
    num_blocks[1:][is_linked] = num_blocks[:-1][is_linked] = common[is_linked]
    begins = np.flatnonzero(np.concatenate([[True], ~is_linked]))  # the first row of each run of linked ones
    lengths = np.diff(begins, append=len(table))
    within = np.arange(len(table)) - np.repeat(begins, lengths)
    first = np.flatnonzero((within % ROWS_AT_ONCE == 0) & (num_blocks > 0))
    left = np.repeat(lengths, lengths)[first] - within[first]
    return SharedPrompts(num_blocks, first, np.minimum(left, ROWS_AT_ONCE))
