"""Which rows begin with the same blocks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.shared_prompts import ROWS_AT_ONCE, find_shared


def table(*rows: list[int]) -> np.ndarray:
    """Padded with blocks of nobody."""
    width = max(map(len, rows)) + 1
    return np.array([[*row, *range(-1 - width * i, -1 - width * (i + 1) + len(row), -1)] for i, row in enumerate(rows)])


def test_samples_of_two_prompts() -> None:
    found = find_shared(table([1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 3, 9], [4, 5, 6], [4, 5, 11], [12]))
    assert found is not None
    assert found.num_blocks.tolist() == [3, 3, 3, 2, 2, 0]
    assert found.first.tolist() == [0, 3] and found.count.tolist() == [3, 2]
    assert found.num_saved == 2 * 3 + 2


def test_nothing_is_shared() -> None:
    assert find_shared(table([1, 2], [3, 2], [4])) is None
    assert find_shared(table([1, 2])) is None


def test_what_all_share_does_not_hide_what_few_share() -> None:
    found = find_shared(table([1, 2, 3, 7], [1, 2, 3, 8], [1, 5, 9], [1, 5, 10], [1, 6]))
    assert found is not None
    assert found.num_blocks.tolist() == [3, 3, 2, 2, 0]


def test_many_rows_are_several_chunks() -> None:
    found = find_shared(table(*([1, 2, 10 + i] for i in range(ROWS_AT_ONCE + 1))))
    assert found is not None
    assert found.first.tolist() == [0, ROWS_AT_ONCE] and found.count.tolist() == [ROWS_AT_ONCE, 1]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=30))
def test_rows_of_a_chunk_begin_alike(rows: list[list[int]]) -> None:
    blocks = table(*sorted(rows))
    found = find_shared(blocks)
    if found is None:
        return
    assert len(found.first) <= len(blocks) // 2
    covered = np.zeros(len(blocks), bool)
    for first, count in zip(found.first, found.count, strict=True):
        shared = found.num_blocks[first : first + count]
        assert (shared == shared[0]).all() and shared[0] > 0
        assert (blocks[first : first + count, : shared[0]] == blocks[first, : shared[0]]).all()
        assert not covered[first : first + count].any()
        covered[first : first + count] = True
    assert (covered == (found.num_blocks > 0)).all()
