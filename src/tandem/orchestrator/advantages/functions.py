"""Advantages from the rewards of a whole batch of groups. Pure functions; a group's rewards are one list.

If all rewards in a comparison are equal, the advantages are exact zeros: there is nothing to learn from them. All
standard deviations are those of the population.
"""

import statistics
from collections.abc import Sequence

Groups = Sequence[Sequence[float]]
Advantages = list[list[float]]
TurnGroups = Sequence[Sequence[Sequence[float]]]  # of each turn of each rollout of each group
TurnAdvantages = list[list[list[float]]]

# Keeps rounding differences from being scaled up to the size of real ones.
EPSILON = 1e-6


def grpo_advantages(groups: Groups) -> Advantages:
    """(r − mean) / (std + ε) of the group, with the population standard deviation."""
    return [scaled(centred(group), statistics.pstdev(group)) for group in groups]


def dr_grpo_advantages(groups: Groups) -> Advantages:
    """r − mean of the group."""
    return [centred(group) for group in groups]


def rloo_advantages(groups: Groups) -> Advantages:
    """r − mean of the others in the group, which is n / (n − 1) · (r − mean of the group of n)."""
    return [[value * len(group) / (len(group) - 1) for value in centred(group)] for group in groups]


def reinforce_pp_advantages(groups: Groups) -> Advantages:
    """(r − mean) / (std + ε) of the whole batch."""
    everything = [reward for group in groups for reward in group]
    values = iter(scaled(centred(everything), statistics.pstdev(everything)))
    return [[next(values) for _ in group] for group in groups]


def reinforce_pp_baseline_advantages(groups: Groups) -> Advantages:
    """d = r − mean of the group; d / (std + ε), std of d in the whole batch."""
    differences = dr_grpo_advantages(groups)
    std = statistics.pstdev([value for group in differences for value in group])
    return [scaled(group, std) for group in differences]


def maxrl_advantages(groups: Groups) -> Advantages:
    """(r − mean) / mean of the group, for rewards from 0 to 1: the gradient of the log of the solve rate, up to the
    order of the group's size. Zeros where the mean is not positive: nothing was solved."""
    means = [statistics.fmean(group) for group in groups]
    return [
        [value / mean if mean > 0 else 0.0 for value in centred(group)]
        for group, mean in zip(groups, means, strict=True)
    ]


def reward_advantages(groups: Groups) -> Advantages:
    """r, as it is."""
    return [list(group) for group in groups]


def zero_advantages(groups: Groups) -> Advantages:
    """0: the policy does not learn from rewards."""
    return [[0.0] * len(group) for group in groups]


def returns_by_turn(reward: float, earned: Sequence[float]) -> list[float]:
    """What each turn and those after it earned: the reward without what the turns before it had earned."""
    return [reward - before for before in earned]


def per_turn_advantages(groups: TurnGroups) -> TurnAdvantages:
    """(g − mean) / (std + ε) over the rollouts of the group that have such a turn, g the return from that turn on. 0
    where a rollout is the only one that got that far."""
    return [_compare_turns(group) for group in groups]


def _compare_turns(rollouts: Sequence[Sequence[float]]) -> list[list[float]]:
    advantages: list[list[float]] = [[] for _ in rollouts]
    for turn in range(max(len(returns) for returns in rollouts)):
        there = [number for number, returns in enumerate(rollouts) if turn < len(returns)]
        [compared] = grpo_advantages([[rollouts[number][turn] for number in there]])
        for number, advantage in zip(there, compared, strict=True):
            advantages[number].append(advantage)
    return advantages


def centred(rewards: Sequence[float]) -> list[float]:
    """r − mean; exact zeros where all are equal, which the rounding of the mean could spoil."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def scaled(values: Sequence[float], std: float) -> list[float]:
    return [value / (std + EPSILON) for value in values]
