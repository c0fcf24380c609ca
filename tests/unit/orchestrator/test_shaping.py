"""Penalties on length, by hand and against TRL's."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import say_more

from tandem.algorithms.length_penalties import length_bonuses, overlong_penalty
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.orchestrator.shaping import RewardShaping


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, 0.1), (90, 1.0), (95, 1.5), (100, 2.0), (120, 2.0)],
)
def test_the_penalty_grows_over_the_buffer(num_tokens: int, penalty: float) -> None:
    """At most 100 tokens, a buffer of 20, a penalty of 2: a tenth for each token beyond 80."""
    assert overlong_penalty(num_tokens, max_tokens=100, buffer_tokens=20, penalty=2.0) == pytest.approx(penalty)


@pytest.mark.filterwarnings("ignore")
def test_it_is_the_penalty_of_trl() -> None:
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    lengths = range(1, 13)
    ours = [-overlong_penalty(length, max_tokens=10, buffer_tokens=4, penalty=1.0) for length in lengths]
    assert ours == pytest.approx(theirs([[0] * length for length in lengths]))


def shaping(**options: Any) -> RewardShaping:
    defaults = {"model": {"name": "models/base"}, "sampling": {"max_tokens": 3}}
    return RewardShaping(OrchestratorConfig.model_validate(defaults | options))


def test_rewards_of_groups(make_group) -> None:
    """Completions of one, two and three tokens; the buffer is the last two of three."""
    groups = [make_group(0, rewards=(1.0, 1.0, 1.0)), make_group(1, rewards=(0.0, 0.5))]
    shaped = shaping(overlong={"buffer_tokens": 2, "penalty": 0.5})
    assert [shaped.rewards(group) for group in groups] == [[1.0, 0.75, 0.5], [0.0, 0.25]]
    assert shaped.metrics(groups) == pytest.approx({"reward/shaped_mean": 0.5, "completions/overlong": 0.6})


def test_the_longest_turn_of_a_conversation_is_penalized_and_all_of_them_together_are_its_length(make_group) -> None:
    """The limit is that of one turn: turns of one and two tokens are over by one of the buffer, (1, 1, 1) are not."""
    first, _, three = make_group(0, rewards=(1.0, 1.0, 1.0)).rollouts
    group = replace(make_group(0), rollouts=[say_more(first, [5, 6]), say_more(first, [5], [6]), three])
    shaped = shaping(overlong={"buffer_tokens": 2, "penalty": 0.5})
    assert shaped.rewards(group) == [0.75, 1.0, 0.5]
    assert shaped.metrics([group])["completions/overlong"] == pytest.approx(2 / 3)
    longer = replace(group, rollouts=[say_more(first, [5], [6], [7]), three])
    assert shaping(length_penalty={"weight": 1.0}).rewards(longer) == [0.5, 1.5]


def test_without_the_options_rewards_stay_as_they_are(make_group) -> None:
    group = make_group(0, rewards=(1.0, 0.0))
    assert shaping().rewards(group) == [1.0, 0.0]
    assert shaping().metrics([group]) == {}


def test_short_completions_gain_only_where_they_solve_the_task() -> None:
    assert length_bonuses([10, 20, 30], [True] * 3) == [0.5, 0.0, -0.5]
    assert length_bonuses([10, 20, 30], [False] * 3) == [0.0, 0.0, -0.5]
    assert length_bonuses([7, 7], [True, False]) == [0.0, 0.0]


def test_the_length_penalty_is_weighted_and_knows_what_is_solved(make_group) -> None:
    group = make_group(0, rewards=(0.5, 0.8, 0.8))
    shaped = shaping(length_penalty={"weight": 0.2}, solved_reward=0.8)
    assert shaped.rewards(group) == pytest.approx([0.5, 0.8, 0.7])
    assert shaped.metrics([group]) == pytest.approx({"reward/shaped_mean": 2.0 / 3})
    assert shaping(length_penalty={"weight": 0.2}, solved_reward=0.5).rewards(group)[0] == pytest.approx(0.6)
