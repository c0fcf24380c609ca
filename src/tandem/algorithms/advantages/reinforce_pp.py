"""REINFORCE++: rewards normalized over the whole batch. https://arxiv.org/abs/2501.03262"""

import statistics

from tandem.algorithms.advantages.kind import Advantage, Advantages, Groups, centred, scaled


def reinforce_pp_advantages(groups: Groups) -> Advantages:
    """(r − mean) / (std + ε) of the whole batch."""
    everything = [reward for group in groups for reward in group]
    values = iter(scaled(centred(everything), statistics.pstdev(everything)))
    return [[next(values) for _ in group] for group in groups]


def reinforce_pp_baseline_advantages(groups: Groups) -> Advantages:
    """d = r − mean of the group; d / (std + ε), std of d in the whole batch."""
    differences = [centred(group) for group in groups]
    std = statistics.pstdev([value for group in differences for value in group])
    return [scaled(group, std) for group in differences]


REINFORCE_PP = Advantage(
    "reinforce_pp",
    "reward minus the batch's mean, divided by the batch's standard deviation",
    reinforce_pp_advantages,
    is_group_relative=False,
)
REINFORCE_PP_BASELINE = Advantage(
    "reinforce_pp_baseline", "the group's mean, the batch's deviation", reinforce_pp_baseline_advantages
)
