"""Rewards by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.rewards.functions import exact_match, positional_match


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("abcd", "abcd", 1.0),
        ("abxd", "abcd", 0.75),
        ("ab", "abcd", 0.5),
        ("abcdabcd", "abcd", 0.5),  # extra text costs
        ("bcda", "abcd", 0.0),  # every letter is right, none is in its place
        ("", "abcd", 0.0),
        ("", "", 1.0),
    ],
)
def test_positional_match(completion: str, answer: str, reward: float) -> None:
    assert positional_match(completion, answer) == reward


def test_exact_match() -> None:
    assert exact_match(" abc\n", "abc") == 1.0
    assert exact_match("ab c", "abc") == 0.0


@settings(max_examples=50)
@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_rewards_lie_between_0_and_1_and_only_the_answer_gets_1(completion: str, answer: str) -> None:
    reward = positional_match(completion, answer)
    assert 0 <= reward <= 1
    assert (reward == 1) == (completion == answer)
