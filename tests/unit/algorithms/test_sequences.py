"""Sums within sequences, against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.sequences import discounted_sums, is_last_token, sequence_lengths, sum_by_sequence


def slow_discounted_sums(sequences: list[list[float]], discount: float) -> list[float]:
    results = []
    for values in sequences:
        following, backwards = 0.0, []
        for value in reversed(values):
            following = value + discount * following
            backwards.append(following)
        results += reversed(backwards)
    return results


def test_discounted_sums_by_hand() -> None:
    """From the end: 4; 2 + 4/2 = 4; 1 + 4/2 = 3. The second sequence is alone."""
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    sequences = torch.tensor([0, 0, 0, 1])
    assert discounted_sums(values, sequences, 0.5).tolist() == [3.0, 4.0, 4.0, 8.0]
    assert discounted_sums(values, sequences, 1.0).tolist() == [7.0, 6.0, 4.0, 8.0]
    assert discounted_sums(values, sequences, 0.0).tolist() == values.tolist()


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=17), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_discounted_sums_are_those_of_a_loop(sequences: list[list[float]], discount: float) -> None:
    values = torch.tensor([value for sequence in sequences for value in sequence], dtype=torch.float64)
    numbers = torch.tensor([number for number, sequence in enumerate(sequences) for _ in sequence])
    actual = discounted_sums(values, numbers, discount)
    assert actual.tolist() == pytest.approx(slow_discounted_sums(sequences, discount), abs=1e-9)


def test_sequences_without_tokens_count_as_empty() -> None:
    sequences = torch.tensor([0, 0, 2])
    assert sequence_lengths(sequences, 4).tolist() == [2, 0, 1, 0]
    assert sum_by_sequence(torch.tensor([1.0, 2.0, 4.0]), sequences, 4).tolist() == [3.0, 0.0, 4.0, 0.0]


def test_nothing_has_sums_of_nothing() -> None:
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert discounted_sums(nothing, none, 1.0).tolist() == []
    assert is_last_token(none).tolist() == []


def test_where_sequences_end() -> None:
    assert is_last_token(torch.tensor([0, 0, 2, 3, 3])).tolist() == [False, True, True, False, True]
