"""Advantages relative to the group."""

import statistics

EPSILON = 1e-6


def grpo_advantages(rewards: list[float], normalize_std: bool) -> list[float]:
    """a_i = r_i - mean(r), divided by (std(r) + epsilon) where asked; std over the group, not a sample of it.

    A group whose rewards are all the same gets exact zeros: there is nothing to learn from it.
    """
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    scale = statistics.pstdev(rewards) + EPSILON if normalize_std else 1.0
    return [(reward - mean) / scale for reward in rewards]
