"""The reward as it is, for a critic to compare (PPO), and none at all, for a teacher model alone."""

from tandem.algorithms.advantages.kind import Advantage, Advantages, Groups


def reward_advantages(groups: Groups) -> Advantages:
    """r, as it is."""
    return [list(group) for group in groups]


def zero_advantages(groups: Groups) -> Advantages:
    """0: the policy does not learn from rewards."""
    return [[0.0] * len(group) for group in groups]


REWARD = Advantage("reward", "the reward itself (for ppo)", reward_advantages, is_group_relative=False)
NONE = Advantage("none", "zero (for a teacher model alone)", zero_advantages, is_group_relative=False)
