"""Options of the orchestrator."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tandem.config.advantages import AdvantageConfig, LengthPenaltyConfig, OverlongConfig
from tandem.config.base import Config
from tandem.config.filters import CurriculumConfig, FilterConfig
from tandem.config.rewards import AnyReward
from tandem.config.shared import (
    KeyOptions,
    LogOptions,
    MetricsConfig,
    ModelOptions,
    RunOptions,
    SeedOptions,
    SyncOptions,
    root_url,
)
from tandem.utils.errors import UserError

OUTAGE_TIMEOUT_S = 600.0


class ClientConfig(KeyOptions):
    """How to reach the inference server."""

    section = "client"

    base_url: str = "http://127.0.0.1:8000"
    """Address of the server, with or without /v1. Several: a list, or separated by commas. Requests go to the one with
    the least to do; one that goes away is replaced by the others and gets its weights when it returns."""

    servers_file: Path | None = None
    """File with the addresses of the servers, one a line, instead of base_url. It is read again and again: servers may
    be added and removed during the run."""

    startup_timeout_s: float = Field(default=600.0, gt=0)
    """How long to wait for /health at the start."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one request."""

    update_mode: Literal["keep", "wait"] = "keep"
    """What happens to running requests at a weight sync. keep: they continue under the new weights, with their KV cache
    recomputed. wait: they finish first and no new ones start; better for short completions."""

    retries: int = Field(default=3, ge=0)
    """How often to resend a request that failed although the server is healthy."""

    outage_timeout_s: float = Field(default=OUTAGE_TIMEOUT_S, gt=0)
    """How long to wait for a server that is gone; weights_timeout_s has to allow for it. When it is back, it gets its
    weights again and open requests are resent: nothing is lost."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, list) else value

    @field_validator("base_url")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        urls = [root_url(url.strip()) for url in value.split(",")]
        if len(set(urls)) < len(urls):
            raise ValueError(f"{value!r} names a server twice; give each once")
        return ",".join(urls)

    @property
    def base_urls(self) -> list[str]:
        """Where the servers are at the start."""
        return self.base_url.split(",") if self.servers_file is None else read_servers(self.servers_file)


def read_servers(path: Path) -> list[str]:
    """The addresses in `client.servers_file`; empty lines and those after # count for nothing."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        urls = [root_url(line) for line in lines if line]
    except (OSError, ValueError) as error:
        raise UserError(f"client.servers_file = '{path}' cannot be used: {error}") from error
    if not urls:
        raise UserError(f"client.servers_file = '{path}' names no server; write one address a line")
    return list(dict.fromkeys(urls))


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


class TruncationConfig(Config):
    """Truncated sampling: only likely tokens are drawn."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability. 1: from all."""

    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the likeliest tokens. 0: from all."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample from tokens with at least this probability, relative to the likeliest. 0: from all."""

    @property
    def truncation(self) -> dict[str, float]:
        """Those that cut something off."""
        given = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in given.items() if value != TruncationConfig.model_fields[name].default}


class SamplingConfig(TruncationConfig):
    """Sampling of rollouts. With top_p, top_k or min_p, rollouts are off-policy: see docs/algorithms.md."""

    temperature: float = Field(default=1.0, ge=1e-5)
    """Softmax temperature, in the engine and in the trainer. Servers treat anything below 1e-5 as greedy."""

    max_tokens: int = Field(default=128, ge=1)
    """Longest completion, in tokens."""

    stop: list[str] = Field(default=[], max_length=64)
    """Texts that end a completion, also in evaluation. They are learned; the reward function does not see them."""

    @field_validator("stop")
    @classmethod
    def _are_texts(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty text would end every completion at once; leave it out")
        return value


class SampleOptions(TruncationConfig):
    """How completions are drawn that are not learned from."""

    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature of evaluation. 0: greedy."""

    @model_validator(mode="after")
    def _draws_at_random(self) -> Self:
        if self.truncation and self.temperature == 0:
            (name, value), *_ = self.truncation.items()
            raise ValueError(f"{name} = {value:g} has no effect with temperature = 0 (greedy); give a temperature")
        return self


class EvalConfig(SampleOptions):
    """Evaluation on held-out prompts; always before the first step and after the last."""

    every: int | None = Field(default=None, ge=1)
    """Also evaluate every so many steps."""

    num_prompts: int = Field(default=64, ge=1)
    """Held-out prompts per evaluation."""

    samples: int = Field(default=1, ge=1)
    """Completions of each prompt. With k of them the reward is avg@k, and pass@1 … pass@k are logged too."""

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvalConfig":
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples = {self.samples} are all the same with temperature = 0 (greedy); give a temperature"
            )
        return self


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


class OrchestratorConfig(LogOptions, SeedOptions, SyncOptions, RunOptions, ModelOptions):
    """The orchestrator: tasks, rewards, advantages, staleness, batches."""

    client: ClientConfig = ClientConfig()
    env: EnvConfig = EnvConfig()
    envs: list[MixedEnvConfig] = []
    """Several environments, mixed by weight. Instead of env."""

    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    overlong: OverlongConfig | None = None
    """Penalize long completions. Left out: no penalty."""

    length_penalty: LengthPenaltyConfig | None = None
    """Prefer short completions. Left out: no preference."""

    solved_reward: float = 1.0
    """A rollout with at least this reward counts as solved: in the curriculum, in length_penalty and in pass@k."""

    filters: FilterConfig = FilterConfig()
    curriculum: CurriculumConfig | None = None
    """Visit easy and hard tasks less often. Left out: all tasks equally often."""

    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts (groups) in a training batch."""

    group_size: int = Field(default=8, ge=1)
    """Rollouts of each prompt. prompts_per_step x group_size = rollouts per step."""

    oversampling: float = Field(default=1.0, ge=1, le=4)
    """Start this many times prompts_per_step groups. A step takes the first prompts_per_step that finish; at
    max_staleness = 0 the others are cut off and sampled again with the next version. More than 1 saves waiting for the
    longest completions and favours short ones within a step; every task still has its turn."""

    max_staleness: int = Field(default=1, ge=0)
    """How many versions the oldest token of a batch may lag behind the policy. 0: strictly on-policy. 1: generation and
    training overlap. More: fully asynchronous."""

    keep_rollouts: int = Field(default=4, ge=1)
    """Number of batches to keep on disk after they were trained on."""

    weights_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for new weights from the trainer, or for the rollouts of a step."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """End the run when more than this share of the rollouts of 64 groups failed. 0: at the first failure. 1: never."""

    @property
    def plans(self) -> dict[str, EnvPlan]:
        """The environments by name; a single one has none."""
        if not self.envs:
            plan = EnvPlan("", self.env, 1.0, self.group_size, self.sampling, self.filters, self.eval.num_prompts)
            return {"": plan}
        return {env.own_name: self._plan(env) for env in self.envs}

    def _plan(self, env: MixedEnvConfig) -> EnvPlan:
        sampling = self.sampling.model_dump() | env.sampling.model_dump(exclude_none=True)
        return EnvPlan(
            name=env.own_name,
            env=env.env,
            weight=env.weight,
            group_size=env.group_size or self.group_size,
            sampling=SamplingConfig.model_validate(sampling),
            filters=env.filters or self.filters,
            num_eval_prompts=env.num_eval_prompts or self.eval.num_prompts,
        )

    @model_validator(mode="after")
    def _mixes(self) -> "OrchestratorConfig":
        if not self.envs:
            return self
        if self.env != EnvConfig():
            raise ValueError(f"env.id = {self.env.id!r} and envs are both given; add it to envs")
        names = [env.own_name for env in self.envs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"envs: two of them are called {twice[0]!r}; give each a name")
        for number, plan in enumerate(self.plans.values()):
            if plan.group_size < 2 and self.advantage.is_group_relative:
                raise ValueError(f"envs.{number}.group_size = 1 leaves nothing to compare; set it to 2 or more")
            if plan.sampling.max_tokens >= self.seq_len:
                raise ValueError(
                    f"envs.{number}.sampling.max_tokens = {plan.sampling.max_tokens} leaves no room for a prompt in "
                    f"seq_len = {self.seq_len}; the largest valid value is {self.seq_len - 1}"
                )
            if self.overlong is not None and plan.sampling.max_tokens != self.sampling.max_tokens:
                raise ValueError(
                    f"envs.{number}.sampling.max_tokens = {plan.sampling.max_tokens} with overlong, which is relative "
                    f"to sampling.max_tokens = {self.sampling.max_tokens}; leave out one of them"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> "OrchestratorConfig":
        if self.group_size < 2 and self.advantage.is_group_relative:
            raise ValueError(
                f"group_size = {self.group_size} with advantage.type = {self.advantage.type!r}: advantages "
                "relative to the group are always zero in a group of one; set group_size to 2 or more"
            )
        if self.max_staleness < self.sync_every - 1:
            raise ValueError(
                f"sync_every = {self.sync_every} with max_staleness = {self.max_staleness}: the last batch before a "
                f"weight sync is {self.sync_every - 1} versions old; set max_staleness to {self.sync_every - 1} or more"
            )
        if self.overlong is not None and self.overlong.buffer_tokens > self.sampling.max_tokens:
            raise ValueError(
                f"overlong.buffer_tokens = {self.overlong.buffer_tokens} is more than sampling.max_tokens = "
                f"{self.sampling.max_tokens}; the largest valid value is {self.sampling.max_tokens}"
            )
        if self.deterministic and self.max_staleness > 0:
            raise ValueError(
                f"deterministic = true needs max_staleness = 0, not {self.max_staleness}: if generation "
                "and training overlap, the version that samples a token depends on timing"
            )
        if self.deterministic and self.oversampling > 1:
            raise ValueError(
                f"oversampling = {self.oversampling:g} with deterministic = true: which groups finish first depends on "
                "timing; set oversampling = 1"
            )
        outage_s = self.client.outage_timeout_s
        if outage_s > self.weights_timeout_s and outage_s != OUTAGE_TIMEOUT_S:  # the default may give way
            raise ValueError(
                f"client.outage_timeout_s = {outage_s:g} is longer than weights_timeout_s = "
                f"{self.weights_timeout_s:g}, the longest wait for the rollouts of a step, server or not; give "
                f"weights_timeout_s at least {outage_s:g}"
            )
        if self.sampling.max_tokens >= self.seq_len:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"seq_len = {self.seq_len}; the largest valid value is {self.seq_len - 1}"
            )
        return self
