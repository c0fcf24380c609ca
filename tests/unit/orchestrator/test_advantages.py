"""Advantages from rewards, by hand."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.orchestrator.conftest import MakeGroup
from tests.unit.orchestrator.fakes import say_more

from tandem.algorithms.advantages import ADVANTAGES, AdvantageConfig
from tandem.algorithms.advantages.dr_grpo import dr_grpo_advantages
from tandem.algorithms.advantages.grpo import grpo_advantages
from tandem.algorithms.advantages.maxrl import maxrl_advantages
from tandem.algorithms.advantages.per_turn import per_turn_advantages, returns_by_turn
from tandem.algorithms.advantages.plain import reward_advantages, zero_advantages
from tandem.algorithms.advantages.reinforce_pp import reinforce_pp_advantages, reinforce_pp_baseline_advantages
from tandem.algorithms.advantages.rloo import rloo_advantages
from tandem.orchestrator.advantages import (
    checked_advantages,
    make_advantage_function,
    make_batch_advantages,
    try_advantages,
)
from tandem.rewards.checked import MAX_REWARD
from tandem.utils.errors import UserError

RELATIVE = ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]
GROUPS = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(st.floats(0, 1), min_size=size, max_size=size), min_size=1, max_size=4)
)


def test_dr_grpo_by_hand() -> None:
    assert dr_grpo_advantages([[1.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0]]) == [[0.5, -0.5, -0.5, 0.5], [2.0, -1.0, -1.0]]


def test_grpo_by_hand() -> None:
    """Mean 1/2, standard deviation of the group 1/2: plus or minus one."""
    assert grpo_advantages([[1.0, 0.0, 0.0, 1.0]])[0] == pytest.approx([1, -1, -1, 1], abs=1e-5)


def test_the_deviation_is_of_the_group_not_of_a_sample() -> None:
    """Rewards 3, 0, 0: mean 1, deviations 2, -1, -1, variance 6/3 = 2 (a sample's would be 3)."""
    root = math.sqrt(2)
    assert grpo_advantages([[3.0, 0.0, 0.0]])[0] == pytest.approx([2 / root, -1 / root, -1 / root], abs=1e-5)


def test_rloo_by_hand() -> None:
    """3 - mean(0, 6) = 0; 0 - mean(3, 6) = -4.5; 6 - mean(3, 0) = 4.5."""
    assert rloo_advantages([[3.0, 0.0, 6.0], [1.0, 0.0]]) == [[0.0, -4.5, 4.5], [1.0, -1.0]]


def test_reinforce_pp_by_hand() -> None:
    """Rewards 0, 4, 4, 4 of two groups: mean 3, variance (9 + 1 + 1 + 1) / 4 = 3."""
    root = math.sqrt(3)
    expected = [[-3 / root, 1 / root], [1 / root, 1 / root]]
    for actual, wanted in zip(reinforce_pp_advantages([[0.0, 4.0], [4.0, 4.0]]), expected, strict=True):
        assert actual == pytest.approx(wanted, abs=1e-5)


def test_reinforce_pp_takes_groups_of_one() -> None:
    assert reinforce_pp_advantages([[0.0], [2.0]]) == [pytest.approx([-1], abs=1e-5), pytest.approx([1], abs=1e-5)]


def test_reinforce_pp_with_the_groups_baseline_by_hand() -> None:
    """Differences -2, 2, 0, 0: variance 8 / 4 = 2."""
    first, second = reinforce_pp_baseline_advantages([[0.0, 4.0], [4.0, 4.0]])
    assert first == pytest.approx([-math.sqrt(2), math.sqrt(2)], abs=1e-5)
    assert second == [0.0, 0.0]


def test_maxrl_by_hand() -> None:
    """One solved of four: (1 − ¼) / ¼ = 3. Where nothing or everything is solved, there is nothing to learn."""
    groups = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert maxrl_advantages(groups) == [[3.0, -1.0, -1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]


def test_maxrl_learns_nothing_from_a_mean_that_is_not_positive() -> None:
    assert maxrl_advantages([[-1.0, 0.0], [-1.0, 1.0]]) == [[0.0, 0.0], [0.0, 0.0]]


def test_rewards_as_they_are_and_none_at_all() -> None:
    assert reward_advantages([(0.25,), (1.0, 2.0)]) == [[0.25], [1.0, 2.0]]
    assert zero_advantages([[0.25], [1.0, 2.0]]) == [[0.0], [0.0, 0.0]]


@pytest.mark.parametrize("type", RELATIVE)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.235])
def test_groups_of_equal_rewards_get_exact_zeros(type, reward: float) -> None:
    """The mean of seven times 0.235 is not 0.235 in binary."""
    advantages = ADVANTAGES[type].compute([[reward] * 7, [0.0, 1.0, 2.0]])
    assert advantages[0] == [0.0] * 7
    assert any(advantages[1])


def test_batches_of_equal_rewards_get_exact_zeros() -> None:
    assert reinforce_pp_advantages([[0.235] * 3, [0.235] * 4]) == [[0.0] * 3, [0.0] * 4]


@pytest.mark.parametrize("type", ["grpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_tiny_differences_do_not_explode(type) -> None:
    assert max(map(abs, ADVANTAGES[type].compute([[1.0, 1.0 + 1e-12]])[0])) < 1e-5


@settings(max_examples=50)
@given(GROUPS, st.sampled_from(RELATIVE))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(groups: list[list[float]], type) -> None:
    for rewards, advantages in zip(groups, ADVANTAGES[type].compute(groups), strict=True):
        assert abs(sum(advantages)) < 1e-6
        for i, first in enumerate(rewards):
            for j, second in enumerate(rewards):
                assert first >= second or advantages[i] <= advantages[j]


@settings(max_examples=50)
@given(GROUPS)
def test_rloo_is_the_reward_less_the_mean_of_the_others(groups: list[list[float]]) -> None:
    for rewards, advantages in zip(groups, rloo_advantages(groups), strict=True):
        for index, advantage in enumerate(advantages):
            others = rewards[:index] + rewards[index + 1 :]
            assert advantage == pytest.approx(rewards[index] - sum(others) / len(others), abs=1e-9)


@settings(max_examples=50)
@given(GROUPS)
def test_reinforce_pp_has_mean_zero_and_at_most_variance_one(groups: list[list[float]]) -> None:
    values = [value for group in reinforce_pp_advantages(groups) for value in group]
    assert abs(sum(values)) < 1e-6
    assert sum(value**2 for value in values) / len(values) <= 1 + 1e-9


def test_turns_are_compared_with_those_of_the_same_number() -> None:
    """Returns 3, 1 at the first turn: mean 2, std 1. 0, 4 at the second: mean 2, std 2. One has a third."""
    [group] = per_turn_advantages([[[3.0, 0.0, 9.0], [1.0, 4.0]]])
    assert group[0] == pytest.approx([1, -1, 0], abs=1e-5)
    assert group[1] == pytest.approx([-1, 1], abs=1e-5)


@settings(max_examples=50)
@given(GROUPS)
def test_credit_by_turn_is_grpo_for_single_turns(groups: list[list[float]]) -> None:
    single = per_turn_advantages([[[reward] for reward in group] for group in groups])
    assert [[advantage for [advantage] in group] for group in single] == grpo_advantages(groups)


def test_a_turn_returns_what_was_earned_from_it_on() -> None:
    assert returns_by_turn(1.7, [0.0, 0.2, 0.7]) == pytest.approx([1.7, 1.5, 1.0])


def test_the_config_chooses_the_function() -> None:
    rewards = [[1.0, 0.0], [0.0, 0.0]]
    assert make_advantage_function(AdvantageConfig())(rewards)[0] == pytest.approx([1, -1], abs=1e-5)
    assert make_advantage_function(AdvantageConfig(type="dr_grpo"))(rewards)[0] == [0.5, -0.5]
    assert make_advantage_function(AdvantageConfig(type="rloo"))(rewards)[0] == [1.0, -1.0]


MINE = """\
import math
import threading

def winners(groups):
    return [[float(reward == max(group)) for reward in group] for group in groups]

def one_group(groups):
    return winners(groups)[:1]

def one_reward(groups):
    return [winner[:1] for winner in winners(groups)]

def infinite(groups):
    return [[float("inf")] + [0.0] * (len(group) - 1) for group in groups]

def fails(groups):
    return [[reward / sum(group) for reward in group] for group in groups]

def logarithmic(groups):
    return [[math.log(1 - reward) for reward in group] for group in groups]

def huge(groups):
    return [[-1e39] + [0.0] * (len(group) - 1) for group in groups]

def ends(groups):
    raise SystemExit(3)

LET_GO = threading.Event()

def hangs(groups):
    LET_GO.wait()
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "advantages_of_a_test.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("advantages_of_a_test", None)


@pytest.mark.parametrize("where", ["advantages_of_a_test", "./advantages_of_a_test.py"])
def test_a_function_that_a_user_brings(own_file: None, where: str) -> None:
    config = AdvantageConfig(type=f"{where}:winners")
    assert make_advantage_function(config)([[1.0, 3.0, 3.0], [2.0]]) == [[0.0, 1.0, 1.0], [1.0]]
    try_advantages(config, group_size=4)


def test_rewards_of_the_example_are_below_one(own_file: None) -> None:
    try_advantages(AdvantageConfig(type="./advantages_of_a_test.py:logarithmic"), group_size=4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_group", r"gives groups of \[2\] advantages for groups of \[2, 2\] rewards"),
        ("one_reward", r"gives groups of \[1, 1\] advantages for groups of \[2, 2\] rewards"),
        ("infinite", "gives advantages that are not finite numbers"),
        ("fails", r"failed: ZeroDivisionError: .*\(advantages_of_a_test\.py:17 in "),
        ("huge", r"gives advantages up to 1e\+39; keep them below 1e\+09"),
        ("ends", r"failed: SystemExit: 3 \(advantages_of_a_test\.py:26 in ends\)"),
        ("winner", r"cannot be imported: .* has no 'winner'; did you mean 'winners'\?"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_the_start(own_file: None, name: str, message: str) -> None:
    config = AdvantageConfig(type=f"./advantages_of_a_test.py:{name}")
    with pytest.raises(UserError, match=rf"advantage\.type = '\./advantages_of_a_test\.py:{name}' .*{message}"):
        try_advantages(config, group_size=2)


def test_a_function_that_hangs_is_refused_before_the_start(own_file: None) -> None:
    config = AdvantageConfig(type="./advantages_of_a_test.py:hangs")
    with pytest.raises(UserError) as caught:
        try_advantages(config, group_size=2, timeout_s=0.2)
    first, *frames = str(caught.value).splitlines()
    assert first == (
        "advantage.type = './advantages_of_a_test.py:hangs' cannot be used: it took longer than 0.2 s on a tiny "
        "example (advantages_of_a_test.py:31 in hangs); it has to end"
    )
    assert any("LET_GO.wait()" in frame for frame in frames)
    sys.modules["advantages_of_a_test"].LET_GO.set()


def test_a_name_that_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match="Input should be 'grpo', 'dr_grpo'"):
        AdvantageConfig(type="grop")


def test_advantages_may_be_as_large_as_rewards() -> None:
    largest = [[MAX_REWARD, -MAX_REWARD]]
    assert checked_advantages(lambda groups: largest, "own", [[1.0, 0.0]]) == largest


def test_advantages_may_be_of_any_type_that_has_a_number() -> None:
    [given] = checked_advantages(lambda groups: torch.tensor(groups), "own", [[0.5, 0.0]])  # type: ignore[arg-type]
    assert given == [0.5, 0.0] and {type(value) for value in given} == {float}


def test_the_advantages_of_a_batch_are_those_of_its_rewards() -> None:
    assert make_batch_advantages(AdvantageConfig(type="rloo"))([], [[1.0, 0.0]]) == [[1.0, -1.0]]


@pytest.mark.parametrize("rewards", [[[1.0]], []])
def test_every_turn_has_its_reward(make_group: MakeGroup, rewards: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="shorter"):
        make_batch_advantages(AdvantageConfig(type="per_turn"))([make_group(0)], rewards)


def test_turns_are_credited_with_the_reward_that_was_not_earned_before_them(make_group: MakeGroup) -> None:
    """Returns 3 and 1 at the first turn, 3 - 2 and 1 - 4 at the second."""
    group = make_group(0)
    one, other = (
        replace(say_more(rollout, [5]), earned_before=[0.0, earned])
        for rollout, earned in zip(group.rollouts, (2.0, 4.0), strict=True)
    )
    batch_advantages = make_batch_advantages(AdvantageConfig(type="per_turn"))
    [[first, second]] = batch_advantages([replace(group, rollouts=[one, other])], [[3.0, 1.0]])
    assert first == pytest.approx([1, 1], abs=1e-5) and second == pytest.approx([-1, -1], abs=1e-5)
