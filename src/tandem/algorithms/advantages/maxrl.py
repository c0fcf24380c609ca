"""MaxRL: (r − mean) / mean of the group, the gradient of log(solve rate). https://arxiv.org/abs/2602.02710"""

import statistics

from tandem.algorithms.advantages.kind import Advantage, Advantages, Groups, centred


def maxrl_advantages(groups: Groups) -> Advantages:
    """(r − mean) / mean of the group, for rewards from 0 to 1: the gradient of the log of the solve rate, up to the
    order of the group's size. Zeros where the mean is not positive: nothing was solved."""
    means = [statistics.fmean(group) for group in groups]
    return [
        [value / mean if mean > 0 else 0.0 for value in centred(group)]
        for group, mean in zip(groups, means, strict=True)
    ]


MAXRL = Advantage(
    "maxrl", "reward minus the group's mean, divided by that mean (for rewards of 0 and 1)", maxrl_advantages
)
