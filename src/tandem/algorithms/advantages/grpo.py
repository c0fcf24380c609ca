"""GRPO: (r − mean) / (std + ε) of the group. https://arxiv.org/abs/2402.03300"""

import statistics

from tandem.algorithms.advantages.kind import Advantage, Advantages, Groups, centred, scaled


def grpo_advantages(groups: Groups) -> Advantages:
    """(r − mean) / (std + ε) of the group, with the population standard deviation."""
    return [scaled(centred(group), statistics.pstdev(group)) for group in groups]


GRPO = Advantage("grpo", "reward minus the group's mean, divided by the group's standard deviation", grpo_advantages)
