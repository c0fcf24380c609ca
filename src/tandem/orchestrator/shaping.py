"""Shaped rewards: those of the environment minus a penalty on overlong completions."""

import statistics
from collections.abc import Sequence

from tandem.config.advantages import OverlongConfig
from tandem.types.rollout import Group


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """0 up to max_tokens − buffer_tokens, then linear, up to `penalty` at max_tokens."""
    excess = num_tokens - (max_tokens - buffer_tokens)
    return penalty * min(max(excess / buffer_tokens, 0.0), 1.0)


def shape_rewards(groups: Sequence[Group], max_tokens: int, overlong: OverlongConfig | None) -> list[list[float]]:
    """The rewards of each group; without `overlong`, as the environment gave them."""
    if overlong is None:
        return [group.rewards for group in groups]
    return [
        [
            rollout.reward
            - overlong_penalty(len(rollout.completion.token_ids), max_tokens, overlong.buffer_tokens, overlong.penalty)
            for rollout in group.rollouts
        ]
        for group in groups
    ]


def shaping_metrics(groups: Sequence[Group], max_tokens: int, overlong: OverlongConfig | None) -> dict[str, float]:
    """The mean of the shaped rewards, and the part of rollouts that are penalized."""
    if overlong is None:
        return {}
    raw = [reward for group in groups for reward in group.rewards]
    shaped = [reward for rewards in shape_rewards(groups, max_tokens, overlong) for reward in rewards]
    return {
        "reward/shaped_mean": statistics.fmean(shaped),
        "completions/overlong": statistics.fmean(after < before for before, after in zip(raw, shaped, strict=True)),
    }
