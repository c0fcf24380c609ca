"""RLOO: r − mean of the others in the group. https://arxiv.org/abs/2402.14740"""

from tandem.algorithms.advantages.kind import Advantage, Advantages, Groups, centred


def rloo_advantages(groups: Groups) -> Advantages:
    """r − mean of the others in the group, which is n / (n − 1) · (r − mean of the group of n)."""
    return [[value * len(group) / (len(group) - 1) for value in centred(group)] for group in groups]


RLOO = Advantage("rloo", "reward minus the mean of the others in the group", rloo_advantages)
