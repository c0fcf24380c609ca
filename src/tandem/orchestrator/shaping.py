"""Rewards before they become advantages: penalties on length."""

import statistics
from collections.abc import Sequence

from tandem.algorithms.length_penalties import length_bonuses, overlong_penalty
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.types.rollout import Group


class RewardShaping:
    """Without `overlong` and `length_penalty`, rewards stay as the environment gave them."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self.overlong = config.overlong
        self.length_penalty = config.length_penalty
        self.max_tokens = config.sampling.max_tokens
        self.solved_reward = config.solved_reward

    def rewards(self, group: Group) -> list[float]:
        rewards = group.rewards
        if self.length_penalty is not None:
            lengths = [rollout.num_sampled for rollout in group.rollouts]
            bonuses = length_bonuses(lengths, [reward >= self.solved_reward for reward in rewards])
            weight = self.length_penalty.weight
            rewards = [reward + weight * bonus for reward, bonus in zip(rewards, bonuses, strict=True)]
        if (overlong := self.overlong) is not None:
            rewards = [
                reward - overlong_penalty(one.longest_turn, self.max_tokens, overlong.buffer_tokens, overlong.penalty)
                for reward, one in zip(rewards, group.rollouts, strict=True)
            ]
        return rewards

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """The mean of the shaped rewards, and the share of completions in the overlong buffer."""
        metrics: dict[str, float] = {}
        if self.overlong is not None or self.length_penalty is not None:
            metrics["reward/shaped_mean"] = statistics.fmean(r for group in groups for r in self.rewards(group))
        if self.overlong is not None:
            limit = self.max_tokens - self.overlong.buffer_tokens
            lengths = [rollout.longest_turn for group in groups for rollout in group.rollouts]
            metrics["completions/overlong"] = statistics.fmean(length > limit for length in lengths)
        return metrics
