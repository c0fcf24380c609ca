"""Shuffled rows without end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data.order import ShuffledOrder


@settings(max_examples=30)
@given(st.integers(1, 30), st.integers(0, 5))
def test_each_epoch_is_a_permutation(size: int, seed: int) -> None:
    order = ShuffledOrder(size, seed)
    for epoch in range(3):
        rows = [order[epoch * size + offset] for offset in range(size)]
        assert sorted(rows) == list(range(size))


@settings(max_examples=30)
@given(st.integers(1, 10), st.lists(st.integers(0, 60), max_size=20))
def test_any_position_at_any_time(size: int, positions: list[int]) -> None:
    sequential = ShuffledOrder(size, 3)
    rows = [sequential[position] for position in range(61)]
    jumping = ShuffledOrder(size, 3)
    assert [jumping[position] for position in positions] == [rows[position] for position in positions]


def test_epochs_and_seeds_differ_and_a_seed_repeats() -> None:
    def rows(seed: int) -> list[int]:
        order = ShuffledOrder(50, seed)
        return [order[position] for position in range(100)]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
    assert rows(1)[:50] != rows(1)[50:]


def test_without_shuffling_rows_come_as_they_lie() -> None:
    order = ShuffledOrder(3, 7, shuffle=False)
    assert [order[position] for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]
