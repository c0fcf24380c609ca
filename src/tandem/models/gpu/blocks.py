"""Which blocks of keys each block of queries looks at, for attention over packed segments. No GPU needed.

A token sees its own segment up to itself, and all of its parent segment. In a `full` block every query sees every key,
so that no mask is applied; in a `partial` one some do. Both are tables (query blocks, key blocks).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 128


@dataclass(frozen=True)
class Sight:
    """Of each token, which keys it sees: from `starts` to itself, and from `prefix_starts` to before `prefix_ends`."""

    starts: NDArray[np.int64]
    prefix_starts: NDArray[np.int64]
    prefix_ends: NDArray[np.int64]


def sight_of(lengths: NDArray[np.int64], parents: NDArray[np.int64], num_tokens: int) -> Sight:
    """Tokens after the last segment are padding, which looks at padding."""
    ends = lengths.cumsum()
    starts = ends - lengths
    prefix_starts = np.where(parents >= 0, starts[parents], 0)
    prefix_ends = np.where(parents >= 0, ends[parents], 0)
    total = int(lengths.sum())
    padding = num_tokens - total
    return Sight(
        np.pad(starts.repeat(lengths), (0, padding), constant_values=total),
        np.pad(prefix_starts.repeat(lengths), (0, padding)),
        np.pad(prefix_ends.repeat(lengths), (0, padding)),
    )


def block_tables(sight: Sight, window: int | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Partial and full blocks. The number of tokens must be a multiple of BLOCK."""
    num_blocks = len(sight.starts) // BLOCK
    ends = np.arange(len(sight.starts)) + 1
    # What a child right after its parent sees is one piece.
    is_joined = sight.prefix_ends == sight.starts
    starts = np.where(is_joined, sight.prefix_starts, sight.starts)
    prefix_ends = np.where(is_joined, sight.prefix_starts, sight.prefix_ends)
    seen, full = np.zeros((2, num_blocks, num_blocks), dtype=np.int64)
    for first, end in ((starts, ends), (sight.prefix_starts, prefix_ends)):
        seen += _count_queries(first // BLOCK, -(-end // BLOCK), first < end)
        full += _count_queries(-(-first // BLOCK), end // BLOCK, first < end)
    is_seen, is_full = seen > 0, full == BLOCK
    if window is not None:
        nearest, farthest = _distances(sight, num_blocks)
        is_seen &= nearest < window
        is_full &= farthest < window
    return is_seen & ~is_full, is_seen & is_full


def lists_of(table: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row, how many blocks it has (rows,), and which, those first (rows, blocks)."""
    counts = table.sum(axis=1)
    rows, columns = np.nonzero(table)
    indices = np.zeros(table.shape, dtype=np.int64)
    indices[rows, np.arange(len(rows)) - (counts.cumsum() - counts)[rows]] = columns
    return counts, indices


def _count_queries(first: NDArray[np.int64], end: NDArray[np.int64], is_some: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(query blocks, key blocks): how many queries have the block between their first and their end."""
    num_blocks = len(first) // BLOCK
    is_some = is_some & (first < end)
    rows, size = np.flatnonzero(is_some) // BLOCK * (num_blocks + 1), num_blocks * (num_blocks + 1)
    begins, ends = (np.bincount(rows + column[is_some], minlength=size) for column in (first, end))
    return (begins - ends).reshape(num_blocks, -1).cumsum(axis=1)[:, :-1]


def _distances(sight: Sight, num_blocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bounds of how far back keys of a block lie, from any query of a block: at least, at most."""
    tokens = np.arange(len(sight.starts))
    positions = tokens - sight.starts + sight.prefix_ends - sight.prefix_starts
    by_block = positions.reshape(num_blocks, BLOCK)
    least, most = by_block.min(axis=1), by_block.max(axis=1)
    return least[:, None] - most[None, :], most[:, None] - least[None, :]
