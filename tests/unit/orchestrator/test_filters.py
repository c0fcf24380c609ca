"""What is left out of training, why, and when that ends the run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import say_more

from tandem.algorithms.filters import FilterConfig
from tandem.algorithms.filters.repetition import repetition
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.orchestrator.failures import TooManyFailures
from tandem.orchestrator.filters import GroupFilter, refuse_hopeless_filters
from tandem.orchestrator.shaping import RewardShaping
from tandem.types.rollout import Group
from tandem.utils.errors import UserError

MakeGroup = Callable[..., Group]


def make_filter(prompts_per_step: int = 2, overlong: dict[str, Any] | None = None, **options: Any) -> GroupFilter:
    config = OrchestratorConfig.model_validate(
        {"model": {"name": "m"}, "filters": options, "overlong": overlong, "sampling": {"max_tokens": 4}}
    )
    return GroupFilter(config.filters, RewardShaping(config), prompts_per_step)


def test_without_options_everything_stays(make_group: MakeGroup) -> None:
    keep = make_filter()
    group = make_group(0, rewards=(1.0, 1.0))
    assert keep(group) is group
    assert keep.take_metrics() == {}


def test_groups_without_signal_are_left_out_and_counted(make_group: MakeGroup) -> None:
    keep = make_filter(equal_rewards=True)
    assert keep(make_group(0, rewards=(1.0, 1.0))) is None
    assert keep(make_group(1, rewards=(0.0, 0.0))) is None
    assert keep(make_group(2, rewards=(1.0, 0.0))) is not None
    assert keep.take_metrics() == {"filters/groups/equal_rewards": 2.0}
    assert keep.take_metrics() == {}


def test_rewards_are_compared_as_they_become_advantages(make_group: MakeGroup) -> None:
    """Of equal rewards, the one of the longer completion is lower by a penalty: there is something to learn."""
    keep = make_filter(equal_rewards=True, overlong={"buffer_tokens": 3})
    assert keep(make_group(0, rewards=(1.0, 1.0))) is not None


@pytest.mark.parametrize(
    ("options", "rewards", "reason"),
    [
        ({"min_reward": 0.3}, (0.0, 0.5), "min_reward"),
        ({"max_reward": 0.7}, (1.0, 0.5), "max_reward"),
        ({"min_reward": 0.25, "max_reward": 0.25}, (0.0, 0.5), None),
    ],
)
def test_the_mean_reward_has_a_range(
    make_group: MakeGroup, options: dict[str, Any], rewards: tuple[float, ...], reason: str | None
) -> None:
    keep = make_filter(**options)
    assert (keep(make_group(0, rewards=rewards)) is None) == (reason is not None)
    assert list(keep.groups) == ([reason] if reason else [])


def test_the_range_is_one_of_rewards_as_the_environment_gave_them(make_group: MakeGroup) -> None:
    """A penalty of a third on the second completion makes the mean 0.83."""
    keep = make_filter(max_reward=0.9, overlong={"buffer_tokens": 3})
    assert keep(make_group(0, rewards=(1.0, 1.0))) is None
    assert keep(make_group(0, rewards=(0.9, 0.9))) is not None


@pytest.mark.parametrize(
    ("options", "filtered"),
    [({"min_tokens": 2}, [0]), ({"max_tokens": 2}, [2]), ({"min_tokens": 2, "max_tokens": 2}, [0, 2])],
)
def test_masked_rollouts_count_in_advantages_only(
    make_group: MakeGroup, options: dict[str, Any], filtered: list[int]
) -> None:
    """Completions of one, two and three tokens."""
    kept = make_filter(**options)(make_group(0, rewards=(1.0, 0.0, 0.5)))
    assert kept is not None and kept.rewards == [1.0, 0.0, 0.5]
    assert [index for index, rollout in enumerate(kept.rollouts) if not rollout.is_trained] == filtered


def test_dropped_rollouts_are_gone(make_group: MakeGroup) -> None:
    keep = make_filter(min_tokens=2, action="drop")
    kept = keep(make_group(0, rewards=(1.0, 0.0, 0.5)))
    assert kept is not None and kept.rewards == [0.0, 0.5]
    assert keep.take_metrics() == {"filters/rollouts/min_tokens": 1.0}
    assert keep.take_metrics() == {}


@pytest.mark.parametrize(("action", "min_tokens"), [("mask", 4), ("drop", 4), ("drop", 3)])
def test_a_group_with_nothing_left_to_learn_from_is_left_out(
    make_group: MakeGroup, action: str, min_tokens: int
) -> None:
    """One rollout alone has no other to be compared with."""
    keep = make_filter(min_tokens=min_tokens, action=action)
    assert keep(make_group(0, rewards=(1.0, 0.0, 0.5))) is None
    assert keep.take_metrics()["filters/groups/empty"] == 1.0


def test_truncated_completions_are_those_that_ended_at_the_limit(make_group: MakeGroup) -> None:
    group = make_group(0, rewards=(1.0, 0.0, 0.5))
    cut = replace(group.rollouts[1], completion=replace(group.rollouts[1].completion, finish_reason="length"))
    group = replace(group, rollouts=[group.rollouts[0], cut, group.rollouts[2]])
    kept = make_filter(truncated=True)(group)
    assert kept is not None and [rollout.is_trained for rollout in kept.rollouts] == [True, False, True]


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([], 0.0), ([1, 2, 3], 0.0), ([1, 2, 3, 4, 5], 0.0), ([1] * 13, 0.9), ([1, 2] * 4, 0.6)],
)
def test_repetition_by_hand(tokens: list[int], share: float) -> None:
    """[1, 2] four times has five 4-grams, two of them different."""
    assert repetition(tokens) == pytest.approx(share)


def test_repetition_is_filtered_above_its_limit(make_group: MakeGroup) -> None:
    group = make_group(0, rewards=(0.0,) * 5 + (1.0,))  # the last two have two and three 4-grams, all the same
    kept = make_filter(max_repetition=0.5)(group)
    assert kept is not None
    assert [rollout.is_trained for rollout in kept.rollouts] == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"max_repetition": 0.5}, [True, False, False]),  # a turn that repeats itself, first or last
        ({"min_tokens": 5}, [True, True, True]),  # of all turns together: 5, 14 and 13
        ({"min_tokens": 6}, [False, True, True]),
        ({"max_tokens": 12}, [True, False, False]),
        ({"truncated": True}, [True, True, False]),  # one turn that was cut off
    ],
)
def test_conversations_are_filtered_by_all_of_their_turns(
    make_group: MakeGroup, options: dict[str, Any], left: list[bool]
) -> None:
    one, same = make_group(0, rewards=(0.0,)).rollouts[0], [5] * 12
    again = replace(one, completion=replace(one.completion, token_ids=same))
    rollouts = [say_more(one, [1, 2, 3, 4]), say_more(again, [1, 2]), say_more(one, same, finish_reason="length")]
    kept = make_filter(**options)(replace(make_group(0), rollouts=rollouts))
    assert kept is not None and [rollout.is_trained for rollout in kept.rollouts] == left


def test_a_step_that_would_never_be_complete_ends_the_run(make_group: MakeGroup) -> None:
    keep = make_filter(prompts_per_step=2, equal_rewards=True, max_refills=2)
    for group_id in range(4):
        assert keep(make_group(group_id, rewards=(0.0, 0.0))) is None
    with pytest.raises(TooManyFailures, match=r"left out 5 groups for one step \(5 × equal_rewards.*max_refills = 2"):
        keep(make_group(4, rewards=(0.0, 0.0)))


@pytest.mark.parametrize("options", [{"min_reward": 1, "max_reward": 0}, {"min_tokens": 5, "max_tokens": 4}])
def test_ranges_with_nothing_in_them_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="nothing would be left"):
        FilterConfig.model_validate(options)


WEIGHTED = [
    {"type": "numeric", "weight": 0.25},
    {"type": "lcs", "weight": -2.25},
    {"type": "exact_match", "weight": 0.25},
]


def refuse_hopeless(**options: Any) -> None:
    tree = {"model": {"name": "m"}, "sampling": {"max_tokens": 10}} | options
    (plan,) = OrchestratorConfig.model_validate(tree).plans.values()
    refuse_hopeless_filters(plan, is_interactive=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filters": {"min_tokens": 11}}, r"^filters\.min_tokens = 11 is more than sampling\.max_tokens = 10, "),
        (
            {"filters": {"min_reward": 1.5}, "env": {"reward": "numeric"}},
            r"^filters\.min_reward = 1\.5 with env\.reward = 'numeric', which is from 0 to 1, so nothing would be left",
        ),
        ({"filters": {"max_reward": -0.5}, "env": {"reward": "lcs"}}, r"^filters\.max_reward = -0\.5 with env\.reward"),
        (
            {"filters": {"min_reward": 0.75}, "env": {"rewards": WEIGHTED}},
            r"^filters\.min_reward = 0\.75 with the sum of env\.rewards, which is from -2\.25 to 0\.5, ",
        ),
        ({"filters": {"max_reward": -2.5}, "env": {"rewards": WEIGHTED}}, r"^filters\.max_reward = -2\.5 with the sum"),
    ],
)
def test_filters_that_no_group_can_pass_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse_hopeless(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"filters": {"min_tokens": 10, "max_reward": -0.5}},
        {"filters": {"min_reward": 1.0, "max_reward": 1.0}, "env": {"reward": "numeric"}},
        {"filters": {"max_reward": 0.0}, "env": {"reward": "numeric"}},
        {"filters": {"min_reward": 1.5}, "env": {"reward": "./mine.py:reward"}},
        {"filters": {"min_reward": 2.0}, "env": {"rewards": [*WEIGHTED, {"type": "./mine.py:reward"}]}},
        {"filters": {"min_reward": 0.5, "max_reward": 0.5}, "env": {"rewards": WEIGHTED}},
        {"filters": {"min_reward": -2.25, "max_reward": -2.25}, "env": {"rewards": WEIGHTED}},
        {"env": {"reward": "numeric"}},
    ],
)
def test_filters_that_a_group_might_pass_are_taken(options: dict[str, Any]) -> None:
    """The environment's own rewards, and users' functions, may be anything."""
    refuse_hopeless(**options)
