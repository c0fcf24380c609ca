"""Options of what is trained on: filters of rollouts and groups, and the curriculum."""

from typing import Literal

from pydantic import Field, model_validator

from tandem.config.base import Config


class FilterConfig(Config):
    """Rollouts and groups that are not trained on. Another prompt takes the place of a group that is left out (dynamic
    sampling)."""

    equal_rewards: bool = False
    """Leave out groups whose rewards are all equal: advantages relative to the group are zero there."""

    min_reward: float | None = None
    """Leave out groups with a lower mean reward."""

    max_reward: float | None = None
    """Leave out groups with a higher mean reward."""

    truncated: bool = False
    """Filter completions that were cut off at sampling.max_tokens."""

    min_tokens: int | None = Field(default=None, ge=1)
    """Filter shorter completions."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Filter longer completions."""

    max_repetition: float | None = Field(default=None, ge=0, lt=1)
    """Filter completions in which a larger share of the sequences of four tokens has come before."""

    action: Literal["mask", "drop"] = "mask"
    """What happens to filtered completions. mask: they count in the group's advantages and are not trained on. drop:
    the group is treated as if they had not been sampled. A group with no completion left to train on, or with only one
    for advantages, is left out."""

    max_refills: int = Field(default=10, ge=1)
    """End the run when a step would need more than this many times prompts_per_step other groups."""

    @model_validator(mode="after")
    def _leaves_something(self) -> "FilterConfig":
        for low, high in (("min_reward", "max_reward"), ("min_tokens", "max_tokens")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(f"{low} = {least:g} is more than {high} = {most:g}; nothing would be left")
        return self


class CurriculumConfig(Config):
    """Visit tasks less often that are nearly always or hardly ever solved. The solve rate is that of the task's latest
    group: the share of rollouts with a reward of at least orchestrator.solved_reward."""

    easy_above: float = Field(default=0.9, ge=0, le=1)
    """Tasks with a higher solve rate go to the easy pool."""

    easy_share: float = Field(default=0.1, ge=0.01, le=1)
    """Share of the visits to tasks of the easy pool that take place."""

    hard_below: float = Field(default=0.1, ge=0, le=1)
    """Tasks with a lower solve rate go to the hard pool."""

    hard_share: float = Field(default=0.5, ge=0.01, le=1)
    """Share of the visits to tasks of the hard pool that take place."""

    @model_validator(mode="after")
    def _pools_are_apart(self) -> "CurriculumConfig":
        if self.hard_below > self.easy_above:
            raise ValueError(
                f"hard_below = {self.hard_below:g} is more than easy_above = {self.easy_above:g}; a task would be in "
                "both pools"
            )
        return self
