"""Options of the orchestrator."""

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tandem.config.advantages import AdvantageConfig, OverlongConfig
from tandem.config.base import Config
from tandem.config.inference import resolve_api_key
from tandem.config.shared import CheckpointConfig, LogLevel, MetricsConfig, ModelConfig, root_url


class ClientConfig(Config):
    """How to reach the inference server."""

    base_url: str = "http://127.0.0.1:8000"
    """Address of the server, with or without /v1."""

    api_key: str | None = None
    """API key to send. Prefer api_key_var."""

    api_key_var: str | None = None
    """Environment variable that holds the API key."""

    startup_timeout_s: float = Field(default=600.0, gt=0)
    """How long the server may take to answer /health at the start."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one request."""

    update_mode: Literal["keep", "wait"] = "keep"
    """What running requests do when weights change. keep: go on under the new ones, their cache computed again.
    wait: end first, while nothing new begins; better for short completions."""

    retries: int = Field(default=3, ge=0)
    """How often a request that failed on its way is sent again to a server that is well."""

    outage_timeout_s: float = Field(default=600.0, gt=0)
    """How long a server that went away may take to come back. Meanwhile nothing is lost: it is given its weights again,
    and requests that were under way are sent again."""

    @model_validator(mode="after")
    def _has_one_key(self) -> "ClientConfig":
        if self.api_key and self.api_key_var:
            raise ValueError("api_key and api_key_var are both given; give one of them")
        return self

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"{value!r} is not the address of a server; give one like 'http://127.0.0.1:8000'")
        return root_url(value)

    def resolve_api_key(self) -> str | None:
        return resolve_api_key(self.api_key, self.api_key_var, "client.api_key_var")


class EnvConfig(Config):
    """The task to learn."""

    id: str = "reverse-text"
    """Name of a registered environment, or one of your own: "package.module:Class" or "./file.py:Class"."""

    args: dict[str, Any] = {}
    """Arguments of the environment."""

    system_prompt: str | None = None
    """A system message to put before every task."""

    check: bool = True
    """Before anything starts, score an empty completion and the answer of one training and one held-out task."""

    startup_timeout_s: float = Field(default=600.0, gt=0)
    """How long making the environment may take, its data included."""

    score_timeout_s: float = Field(default=60.0, gt=0)
    """How long scoring one completion may take; over it, the rollout counts as failed."""

    tries: int = Field(default=3, ge=1)
    """How often rollouts of a task are made, where some fail, before the task is set aside."""


class TruncationConfig(Config):
    """Drawing from the likelier tokens only."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the likeliest tokens that together have this probability; 1: from all."""

    top_k: int = Field(default=0, ge=0)
    """Draw from so many of the likeliest tokens; 0: from all."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Draw from tokens at least so likely, relative to the likeliest; 0: from all."""

    @property
    def truncation(self) -> dict[str, float]:
        """Those that cut something off."""
        given = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in given.items() if value != TruncationConfig.model_fields[name].default}


class SamplingConfig(TruncationConfig):
    """How completions are sampled for training. With top_p, top_k or min_p they are off-policy: docs/algorithms.md."""

    temperature: float = Field(default=1.0, ge=1e-5)
    """Softmax temperature; the trainer uses the same. Servers take anything below 1e-5 for greedy."""

    max_tokens: int = Field(default=128, ge=1)
    """Longest completion, in tokens."""

    stop: list[str] = Field(default=[], max_length=64)
    """Texts that end a completion, also in evaluation; they are learned, and left out of what is scored."""

    @field_validator("stop")
    @classmethod
    def _are_texts(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty text would end every completion at once; leave it out")
        return value


class EvalConfig(TruncationConfig):
    """Evaluation on held-out prompts; always before the first step and after the last."""

    every: int | None = Field(default=None, ge=1)
    """Also after every so many steps."""

    num_prompts: int = Field(default=64, ge=1)
    """Held-out prompts per evaluation."""

    temperature: float = Field(default=0.0, ge=0)
    """0: greedy."""

    @model_validator(mode="after")
    def _draws_at_random(self) -> "EvalConfig":
        if self.truncation and self.temperature == 0:
            (name, value), *_ = self.truncation.items()
            raise ValueError(f"{name} = {value:g} has no effect with temperature = 0 (greedy); give a temperature")
        return self


class OrchestratorConfig(Config):
    """Tasks, rewards, advantages, staleness, batches."""

    model: ModelConfig
    output_dir: Path = Path("outputs/rl")
    """Run directory, shared with the trainer."""

    max_steps: int = Field(default=100, ge=1)
    """Training steps of the run."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest prompt + completion, in tokens."""

    client: ClientConfig = ClientConfig()
    env: EnvConfig = EnvConfig()
    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    overlong: OverlongConfig | None = None
    """Left out: no penalty on length."""

    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts in a training batch."""

    group_size: int = Field(default=8, ge=1)
    """Completions of each prompt; prompts_per_step x group_size = rollouts_per_step."""

    max_staleness: int = Field(default=1, ge=0)
    """How many versions the oldest token of a batch may lag behind the policy being trained.
    0: strictly on-policy. 1: generation and training overlap. More: fully asynchronous."""

    keep_rollouts: int = Field(default=4, ge=1)
    """How many training batches to keep on disk after they were trained on."""

    weights_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for new weights from the trainer, or for the rollouts of a step."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """The run ends when more than this share of the rollouts of 64 groups failed; 0: at the first, 1: never."""

    seed: int = 0
    """Seeds the order of tasks and the sampling."""

    deterministic: bool = False
    """Repeat bit for bit; needs max_staleness = 0."""

    resume: bool = False
    """Go on from the newest complete checkpoint in output_dir."""

    log_level: LogLevel = "info"
    """Least severe log lines to show."""

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @model_validator(mode="after")
    def _consistent(self) -> "OrchestratorConfig":
        if self.group_size < 2 and self.advantage.is_group_relative:
            raise ValueError(
                f"group_size = {self.group_size} with advantage.type = {self.advantage.type!r}: an advantage "
                "relative to the group is always zero in a group of one; the nearest valid group_size is 2"
            )
        if self.overlong is not None and self.overlong.buffer_tokens > self.sampling.max_tokens:
            raise ValueError(
                f"overlong.buffer_tokens = {self.overlong.buffer_tokens} is more than sampling.max_tokens = "
                f"{self.sampling.max_tokens}; the largest valid value is {self.sampling.max_tokens}"
            )
        if self.deterministic and self.max_staleness > 0:
            raise ValueError(
                f"deterministic = true needs max_staleness = 0, not {self.max_staleness}: with overlap, "
                "which weights a rollout meets depends on timing"
            )
        if self.sampling.max_tokens >= self.seq_len:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"seq_len = {self.seq_len}; the largest valid value is {self.seq_len - 1}"
            )
        return self
