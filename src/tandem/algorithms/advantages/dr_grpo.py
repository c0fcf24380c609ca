"""Dr. GRPO: r − mean of the group, without GRPO's division by the deviation. https://arxiv.org/abs/2503.20783"""

from tandem.algorithms.advantages.kind import Advantage, Advantages, Groups, centred


def dr_grpo_advantages(groups: Groups) -> Advantages:
    """r − mean of the group."""
    return [centred(group) for group in groups]


DR_GRPO = Advantage("dr_grpo", "the same, not divided", dr_grpo_advantages)
