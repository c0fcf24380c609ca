"""Mean rewards and pass@k, by hand and by drawing."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.orchestrator.evaluation.scores import confidence, pass_at, passes, summarize


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_solved_one(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    draws = list(itertools.combinations(rewards, k))
    share = statistics.fmean(any(reward >= 1.0 for reward in draw) for draw in draws)
    assert pass_at(k, rewards, solved_reward=1.0) == pytest.approx(share)


@pytest.mark.parametrize(("num_samples", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_which_k_are_told(num_samples: int, ks: list[int]) -> None:
    assert passes(num_samples) == ks


def test_the_summary_by_hand() -> None:
    """Two tasks of two samples: one solved of two, none of two."""
    scores = summarize([[1.0, 0.0], [0.5, 0.0]], solved_reward=0.9)
    assert scores["reward"] == pytest.approx(0.375)
    assert (scores["pass@1"], scores["pass@2"]) == (0.25, 0.5)
    assert scores["pass@2_ci95"] == pytest.approx(1.96 * math.sqrt(0.5) / math.sqrt(2))


def test_of_tasks_with_fewer_samples_no_more_are_drawn_than_all_have() -> None:
    """Three samples and two: pass@3 would say something of the first task alone."""
    scores = summarize([[0.0, 0.0, 1.0], [0.0, 1.0]], solved_reward=1.0)
    assert {name for name in scores if not name.endswith("_ci95")} == {"reward", "pass@1", "pass@2"}
    assert scores["pass@2"] == pytest.approx((2 / 3 + 1) / 2)


def test_confidence_shrinks_with_the_number_of_tasks_and_is_unknown_for_one() -> None:
    assert confidence([0.0, 1.0] * 50) == pytest.approx(1.96 * 0.5 / 10, rel=0.01)
    assert math.isnan(confidence([1.0]))
