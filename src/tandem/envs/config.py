"""Options of environments."""

import re
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from tandem.algorithms.filters import FilterConfig
from tandem.config.base import Config
from tandem.config.sampling import SamplingConfig
from tandem.rewards.config import AnyReward

TAKEN_NAMES = ("", "mean", "std", "min", "max")  # reward/mean and so on are those of all rewards together


class EnvConfig(Config):
    """The environment: tasks and reward function."""

    id: str = "reverse-text"
    """An environment of ours (docs/environments.md has the list), your own as "package.module:Class" or
    "./file.py:Class", or one of the verifiers package as "owner/name"."""

    args: dict[str, Any] = {}
    """Arguments of the environment."""

    reward: str | None = None
    """Reward function instead of the environment's own: exact_match, normalized_match, positional_match, numeric, math,
    lcs, or one of your own, "package.module:function" or "./file.py:function", which gets the completion and the task's
    answer. For options, or several, use rewards."""

    rewards: list[AnyReward] = []
    """Several rewards instead of the environment's own: their weighted sum is learned from, and each is logged by its
    name. See docs/rewards.md."""

    reward_workers: int = Field(default=2, ge=1)
    """Processes that compute those of `rewards` that may take long: math, regex, lcs, json_schema, and your own."""

    system_prompt: str | None = None
    """System message in front of every task."""

    check: bool = True
    """Before the run starts, score an empty completion and the answer of one training and one held-out task."""

    startup_timeout_s: float = Field(default=600.0, gt=0)
    """How long creating the environment may take, its data included."""

    score_timeout_s: float = Field(default=60.0, gt=0)
    """How long the reward function may take for one completion. Past that, the rollout has failed."""

    turn_timeout_s: float = Field(default=60.0, gt=0)
    """How long a multi-turn environment may take between two turns of the model. Past that, the rollout has failed."""

    episode_timeout_s: float = Field(default=3600.0, gt=0)
    """How long an episode of a multi-turn environment may take, the model's turns included."""

    tries: int = Field(default=3, ge=1)
    """Attempts at a task whose rollouts fail, before the task is set aside."""

    @model_validator(mode="after")
    def _rewards_have_names(self) -> "EnvConfig":
        if self.reward is not None and self.rewards:
            raise ValueError(f"reward = {self.reward!r} and rewards are both given; give one of them")
        names = [reward.label for reward in self.rewards]
        for name in names:
            if name in TAKEN_NAMES:
                raise ValueError(f"no reward can be called {name!r}: reward/{name} is taken; give another `name`")
            if names.count(name) > 1:
                raise ValueError(f"two of rewards are called {name!r}; give one of them another `name`")
        return self


class OwnSamplingConfig(Config):
    """How one of several environments is sampled where it differs from `sampling`. The temperature is the same for all:
    the trainer computes log-probs at one temperature."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion, in tokens."""

    stop: list[str] | None = None
    """Texts that end a completion."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability."""

    top_k: int | None = Field(default=None, ge=0)
    """Sample from this many of the likeliest tokens."""

    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens with at least this probability, relative to the likeliest."""


class MixedEnvConfig(EnvConfig):
    """One of several environments to mix."""

    name: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """Its name in metrics and samples; None: its id."""

    weight: float = Field(default=1.0, gt=0)
    """Share of its prompts in every batch, relative to the other environments."""

    group_size: int | None = Field(default=None, ge=1)
    """Rollouts of each of its prompts; None: orchestrator.group_size."""

    sampling: OwnSamplingConfig = OwnSamplingConfig()

    filters: FilterConfig | None = None
    """What of it is not trained on, in place of orchestrator.filters."""

    num_eval_prompts: int | None = Field(default=None, ge=1)
    """Held-out prompts per evaluation; None: eval.num_prompts."""

    @property
    def env(self) -> EnvConfig:
        """Without what is about the mixture."""
        return EnvConfig.model_validate(self.model_dump(include=set(EnvConfig.model_fields)))

    @property
    def own_name(self) -> str:
        return self.name or re.sub(r"[^\w.-]+", "-", self.id.rpartition(":")[2])


@dataclass(frozen=True)
class EnvPlan:
    """An environment with everything that may be its own."""

    name: str  # empty: the only one
    env: EnvConfig
    weight: float
    group_size: int
    sampling: SamplingConfig
    filters: FilterConfig
    num_eval_prompts: int
