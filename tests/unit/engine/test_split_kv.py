"""How contexts are cut for the programs that read them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.split_kv import GRAIN, cut_contexts


def test_a_long_row_is_cut_and_comes_first() -> None:
    assert cut_contexts(np.zeros(3, np.int64), np.array([100, 900, 100]), 5).T.tolist() == [
        [1, 0, 512, 0, 2],
        [1, 512, 900, 1, 2],
        [0, 0, 100, 0, 1],
        [2, 0, 100, 0, 1],
        [0, 0, 0, 0, 0],
    ]


def test_rows_of_one_length_stay_whole() -> None:
    pieces = cut_contexts(np.zeros(8, np.int64), np.full(8, 1000), 16)
    assert pieces[:, :8].T.tolist() == [[row, 0, 1000, 0, 1] for row in range(8)]
    assert not pieces[:, 8:].any()


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 5000)), min_size=1, max_size=40), st.integers(0, 60))
def test_all_is_read_once_by_pieces_of_even_length(contexts: list[tuple[int, int]], to_spare: int) -> None:
    begin = np.array([start for start, _ in contexts])
    end = begin + np.array([length for _, length in contexts])
    pieces = cut_contexts(begin, end, len(contexts) + to_spare)
    assert pieces.shape == (5, len(contexts) + to_spare)
    row, first, last, index, count = pieces[:, pieces[4] > 0]
    for number in range(len(contexts)):
        mine = row == number
        assert index[mine].tolist() == list(range(count[mine][0]))
        assert np.diff(np.flatnonzero(mine)).tolist() == [1] * (count[mine][0] - 1)
        edges = [begin[number], *last[mine]]
        assert edges[:-1] == first[mine].tolist() and edges[-1] == end[number]
    lengths = last - first
    assert (lengths > 0).all()
    if to_spare:
        assert lengths.max() < max(GRAIN, -(-(end - begin).sum() // to_spare)) + GRAIN
    assert (np.diff(lengths[index == 0]) <= 0).all()
