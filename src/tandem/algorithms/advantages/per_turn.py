"""Turn-level GRPO: each turn of a conversation is compared with those of the same number in the group."""

from collections.abc import Sequence

from tandem.algorithms.advantages.grpo import grpo_advantages
from tandem.algorithms.advantages.kind import Advantage, TurnAdvantages, TurnGroups


def returns_by_turn(reward: float, earned: Sequence[float]) -> list[float]:
    """What each turn and those after it earned: the reward without what the turns before it had earned."""
    return [reward - before for before in earned]


def per_turn_advantages(groups: TurnGroups) -> TurnAdvantages:
    """(g − mean) / (std + ε) over the rollouts of the group that have such a turn, g the return from that turn on. 0
    where a rollout is the only one that got that far."""
    return [_compare_turns(group) for group in groups]


def _compare_turns(rollouts: Sequence[Sequence[float]]) -> list[list[float]]:
    advantages: list[list[float]] = [[] for _ in rollouts]
    for turn in range(max(len(returns) for returns in rollouts)):
        there = [number for number, returns in enumerate(rollouts) if turn < len(returns)]
        [compared] = grpo_advantages([[rollouts[number][turn] for number in there]])
        for number, advantage in zip(there, compared, strict=True):
            advantages[number].append(advantage)
    return advantages


PER_TURN = Advantage(
    "per_turn",
    "like grpo, for each turn of a conversation by itself, from what it and later turns earned",
    grpo_advantages,  # of single turns
    compute_by_turn=per_turn_advantages,
)
