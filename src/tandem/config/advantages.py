"""Options of what happens to rewards before they reach the trainer."""

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.base import Config
from tandem.config.names import OrImportPath

AdvantageType = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "reward", "none"]

# Those that compare a reward with the others of its group, so that a group of one has nothing to say.
GROUP_RELATIVE: tuple[AdvantageType, ...] = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


class AdvantageConfig(Config):
    """How rewards become advantages."""

    type: Annotated[AdvantageType | str, OrImportPath(AdvantageType)] = "grpo"
    """grpo: reward minus the group's mean, divided by the group's deviation. dr_grpo: not divided. rloo: reward minus
    the mean of the others. reinforce_pp: reward minus the batch's mean, divided by the batch's deviation.
    reinforce_pp_baseline: minus the group's mean instead. reward: as it is (ppo). none: zero (a teacher alone).
    Or a function of your own, "package.module:function" or "./file.py:function": docs/algorithms.md."""

    @property
    def is_group_relative(self) -> bool:
        return self.type in GROUP_RELATIVE


class OverlongConfig(Config):
    """Soft penalty on completions that come near sampling.max_tokens."""

    buffer_tokens: int = Field(ge=1)
    """The penalty grows over the last so many tokens before sampling.max_tokens."""

    penalty: float = Field(default=1.0, gt=0)
    """Taken from the reward of a completion of sampling.max_tokens."""
