"""How the contexts of decoding rows are cut into pieces, of which a program of the GPU reads one each. No torch.

A row that is longer than the others would be read by one program long after all others have ended. So no piece is
longer than what a program has to read on average, and the longest come first:

    contexts of 100, 900 and 100 tokens, in 5 pieces at most  ─►  row 1: 0 – 512, 512 – 900; row 0; row 2
"""

import numpy as np
from numpy.typing import NDArray

GRAIN = 64  # tokens: the length of all pieces but the last of a row is a multiple of it

Integers = NDArray[np.int64]


def cut_contexts(begin: Integers, end: Integers, num_pieces: int) -> NDArray[np.int32]:
    """Of rows that read their contexts from `begin` to `end`, none of them empty: (5, num_pieces), for each piece its
    row, where it begins and ends, its number in the row, and how many the row has; zeros where there is none. Pieces
    of a row are neighbours. There must be as many pieces as rows at least; the more there are, the shorter they are."""
    lengths = end - begin
    to_spare = num_pieces - len(lengths)
    longest = max(GRAIN, -(-int(lengths.sum()) // to_spare)) if to_spare else int(lengths.max(initial=1))
    shares = -(-lengths // -(-lengths // longest))
    shares = -(-shares // GRAIN) * GRAIN
    counts = -(-lengths // shares)
    order = np.argsort(-np.minimum(shares, lengths), kind="stable")
    row, counts = np.repeat(order, counts[order]), counts[order]
    index = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    first = begin[row] + index * shares[row]
    last = np.minimum(first + shares[row], end[row])
    pieces = np.zeros((5, num_pieces), np.int32)
    pieces[:, : len(row)] = row, first, last, index, np.repeat(counts, counts)
    return pieces
