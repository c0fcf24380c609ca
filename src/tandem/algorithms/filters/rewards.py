"""Groups by their rewards: DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476), and a range of mean rewards."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import model_validator

from tandem.algorithms.filters.kind import Filter
from tandem.algorithms.registry import Options

if TYPE_CHECKING:
    from tandem.types.rollout import Group


class RewardFilter(Options):
    equal_rewards: bool = False
    """Leave out groups whose rewards are all equal: advantages relative to the group are zero there."""

    min_reward: float | None = None
    """Leave out groups with a lower mean reward."""

    max_reward: float | None = None
    """Leave out groups with a higher mean reward."""

    @model_validator(mode="after")
    def _rewards_are_left(self) -> "RewardFilter":
        if self.min_reward is not None and self.max_reward is not None and self.min_reward > self.max_reward:
            raise ValueError(
                f"min_reward = {self.min_reward:g} is more than max_reward = {self.max_reward:g}; nothing would be left"
            )
        return self


def reason(group: "Group", rewards: Sequence[float], options: RewardFilter) -> str | None:
    mean = sum(group.rewards) / len(group.rewards)
    if options.min_reward is not None and mean < options.min_reward:
        return "min_reward"
    if options.max_reward is not None and mean > options.max_reward:
        return "max_reward"
    return "equal_rewards" if options.equal_rewards and len(set(rewards)) == 1 else None


FILTER = Filter("rewards", RewardFilter, of_group=reason)
