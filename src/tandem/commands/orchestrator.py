"""Options of the orchestrator."""

from typing import Any

from pydantic import Field, model_validator

from tandem.algorithms.advantages import AdvantageConfig
from tandem.algorithms.curriculum import CurriculumConfig
from tandem.commands.batches import BatchOptions
from tandem.config.client import OUTAGE_TIMEOUT_S, ClientConfig
from tandem.config.sampling import EvalConfig, SamplingConfig
from tandem.config.shared import LogOptions, ModelOptions, RunOptions, SeedOptions, SyncOptions
from tandem.envs.config import EnvConfig, EnvPlan, MixedEnvConfig
from tandem.utils.errors import shown
from tandem.utils.secrets import hidden


class OrchestratorConfig(BatchOptions, LogOptions, SeedOptions, SyncOptions, RunOptions, ModelOptions):
    """The orchestrator: tasks, rewards, advantages, staleness, batches."""

    client: ClientConfig = ClientConfig()
    env: EnvConfig = EnvConfig()
    envs: list[MixedEnvConfig] = []
    """Several environments, mixed by weight. Instead of env."""

    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    curriculum: CurriculumConfig | None = None
    """Visit easy and hard tasks less often. Left out: all tasks equally often."""

    eval: EvalConfig = EvalConfig()

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

    @model_validator(mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        """The default of `env` may be given along with envs in full, as a resolved configuration has it."""
        env = given.get("env") if isinstance(given, dict) and given.get("envs") else None
        env = env.model_dump() if isinstance(env, EnvConfig) else env
        defaults = EnvConfig().model_dump(), EnvConfig().model_dump(mode="json")
        if isinstance(env, dict) and env not in defaults:
            changed = {key: value for key, value in env.items() if all(value != one.get(key) for one in defaults)}
            keys = ", ".join(f"env.{key} = {shown(value)}" for key, value in hidden(changed or env).items())
            raise ValueError(f"{keys or 'env'} and envs are both given; add it to envs, or leave one of them out")
        return given

    @model_validator(mode="after")
    def _mixes(self) -> "OrchestratorConfig":
        if not self.envs:
            return self
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
    def _filters_leave_something(self) -> "OrchestratorConfig":
        for number, plan in enumerate(self.plans.values()):
            if plan.filters.equal_rewards and plan.group_size == 1:
                place = f"envs.{number}: " if self.envs else ""
                raise ValueError(
                    f"{place}filters.equal_rewards = true with group_size = 1: the rewards of a group of one are "
                    "always equal, so nothing would be left; leave out the filter, or set group_size to 2 or more"
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
