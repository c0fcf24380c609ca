"""Options of rewards before they reach the trainer: advantages and length penalties."""

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.base import Config
from tandem.config.names import OrImportPath

AdvantageType = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "per_turn", "reward", "none"
]
PER_TURN = "per_turn"

# These compare a reward with the others of its group, so a group of one always has advantage zero.
GROUP_RELATIVE: tuple[AdvantageType, ...] = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl", PER_TURN)


class AdvantageConfig(Config):
    """How rewards become advantages."""

    type: Annotated[AdvantageType | str, OrImportPath(AdvantageType)] = "grpo"
    """grpo: reward minus the group's mean, divided by the group's standard deviation. dr_grpo: the same, not divided.
    rloo: reward minus the mean of the others in the group. reinforce_pp: reward minus the batch's mean, divided by the
    batch's standard deviation. reinforce_pp_baseline: the group's mean, the batch's deviation. maxrl: reward minus
    the group's mean, divided by that mean (for rewards of 0 and 1). per_turn: like grpo, for each turn of a
    conversation by itself, from what it and later turns earned. reward: the reward itself (for ppo). none: zero (for a
    teacher model alone). Or a function of your own, "package.module:function" or "./file.py:function":
    docs/algorithms.md."""

    @property
    def is_group_relative(self) -> bool:
        return self.type in GROUP_RELATIVE


class OverlongConfig(Config):
    """Soft penalty on completions close to sampling.max_tokens."""

    buffer_tokens: int = Field(ge=1)
    """The penalty grows linearly over this many tokens before sampling.max_tokens."""

    penalty: float = Field(default=1.0, gt=0)
    """Penalty at sampling.max_tokens, subtracted from the reward."""


class LengthPenaltyConfig(Config):
    """Prefer the short ones among the completions of a group."""

    weight: float = Field(default=0.1, gt=0)
    """Added to the reward: from weight / 2 for the shortest completion of the group to -weight / 2 for the longest.
    Completions below orchestrator.solved_reward only lose by it."""
