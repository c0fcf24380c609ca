"""What an advantage is: a pure function from the rewards of a whole batch of groups; a group's rewards are one list.

If all rewards in a comparison are equal, the advantages are exact zeros: there is nothing to learn from them. All
standard deviations are those of the population.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.algorithms.registry import Algorithm

Groups = Sequence[Sequence[float]]
Advantages = list[list[float]]
TurnGroups = Sequence[Sequence[Sequence[float]]]  # of each turn of each rollout of each group
TurnAdvantages = list[list[list[float]]]

# Keeps rounding differences from being scaled up to the size of real ones.
EPSILON = 1e-6


@dataclass(frozen=True)
class Advantage(Algorithm):
    """Defined in a file of this folder, it is an `advantage.type`."""

    summary: str  # for --help
    compute: Callable[[Groups], Advantages]
    is_group_relative: bool = True  # compares with the others of the group, so in a group of one it is always zero
    compute_by_turn: Callable[[TurnGroups], TurnAdvantages] | None = None  # in place of `compute`, from returns by turn


def centred(rewards: Sequence[float]) -> list[float]:
    """r − mean; exact zeros where all are equal, which the rounding of the mean could spoil."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def scaled(values: Sequence[float], std: float) -> list[float]:
    return [value / (std + EPSILON) for value in values]
