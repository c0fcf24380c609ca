"""Advantages relative to the group, by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.orchestrator import AdvantageConfig
from tandem.orchestrator.advantages import make_advantage_function
from tandem.orchestrator.advantages.grpo import grpo_advantages


def test_without_the_standard_deviation() -> None:
    assert grpo_advantages([1.0, 0.0, 0.0, 1.0], normalize_std=False) == [0.5, -0.5, -0.5, 0.5]
    assert grpo_advantages([3.0, 0.0, 0.0], normalize_std=False) == [2.0, -1.0, -1.0]


def test_with_the_standard_deviation() -> None:
    """Mean 1/2, standard deviation of the group 1/2: plus or minus one."""
    assert grpo_advantages([1.0, 0.0, 0.0, 1.0], normalize_std=True) == pytest.approx([1, -1, -1, 1], abs=1e-5)


def test_the_deviation_is_of_the_group_not_of_a_sample() -> None:
    """Rewards 3, 0, 0: mean 1, deviations 2, -1, -1, variance 6/3 = 2 (a sample's would be 3)."""
    root = 2**0.5
    assert grpo_advantages([3.0, 0.0, 0.0], normalize_std=True) == pytest.approx(
        [2 / root, -1 / root, -1 / root], abs=1e-5
    )


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_give_exact_zeros(reward: float, normalize_std: bool) -> None:
    assert grpo_advantages([reward] * 7, normalize_std) == [0.0] * 7


def test_tiny_differences_do_not_explode() -> None:
    assert max(map(abs, grpo_advantages([1.0, 1.0 + 1e-12], normalize_std=True))) < 1e-5


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=16), st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float], normalize_std: bool) -> None:
    advantages = grpo_advantages(rewards, normalize_std)
    assert abs(sum(advantages)) < 1e-6
    for i, first in enumerate(rewards):
        for j, second in enumerate(rewards):
            assert first >= second or advantages[i] <= advantages[j]


def test_the_config_chooses_the_function() -> None:
    assert make_advantage_function(AdvantageConfig(normalize_std=False))([1.0, 0.0]) == [0.5, -0.5]
    assert make_advantage_function(AdvantageConfig())([1.0, 0.0]) == pytest.approx([1, -1], abs=1e-5)
