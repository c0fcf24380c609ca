"""Rewards before they become advantages: penalties on length."""

import statistics
from collections.abc import Sequence

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.types.rollout import Group


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """0 up to max_tokens − buffer_tokens, then linear, up to `penalty` at max_tokens."""
    excess = num_tokens - (max_tokens - buffer_tokens)
    return penalty * min(max(excess / buffer_tokens, 0.0), 1.0)


def length_bonuses(lengths: Sequence[int], solved: Sequence[bool]) -> list[float]:
    """½ for the shortest completion of a group down to −½ for the longest; those that are not solved get no bonus."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    bonuses = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [bonus if is_solved else min(0.0, bonus) for bonus, is_solved in zip(bonuses, solved, strict=True)]


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
