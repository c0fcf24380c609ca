"""Options of `evaluate`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from tandem.config.sampling import SampleOptions
from tandem.config.shared import ComputeOptions, KeyOptions, LogOptions, SeedOptions, ServerUrl
from tandem.config.slurm import SlurmOptions
from tandem.envs.config import EnvConfig


class EndpointConfig(KeyOptions):
    """An OpenAI-compatible endpoint."""

    section = "endpoint"

    base_url: ServerUrl | None = None
    """Its address, with or without /v1."""

    model: str | None = None
    """The model to ask for. None: the first that /v1/models names."""

    retries: int = Field(default=5, ge=0)
    """How often to send a request again that was refused as too much (429) or not answered."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one request."""


class EvaluateConfig(SlurmOptions, LogOptions, ComputeOptions, SeedOptions, SampleOptions):
    """Evaluation of a model on an environment."""

    model: Path | None = None
    """A model directory. Our own engine serves it for as long as the evaluation takes."""

    run: Path | None = None
    """The directory of a run: every version of its weights that is still there, and the model it started from."""

    endpoint: EndpointConfig = EndpointConfig()

    env: EnvConfig = EnvConfig()

    split: Literal["held_out", "train"] = "held_out"
    """Which tasks of the environment."""

    num_prompts: int | None = Field(default=64, ge=1)
    """Number of tasks, the first of the split. None: all."""

    solved_reward: float = 1.0
    """A completion with at least this reward counts as solved."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion, in tokens. None: as long as the server allows."""

    seq_len: int | None = Field(default=None, ge=2)
    """Longest sequence of the server that is started, prompt and completion together. None: 2,048, or what the model
    allows."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the server that is started."""

    chat_template: Path | None = None
    """Jinja file with a chat template in place of the model's own, for the server that is started. None: that of the
    run, if it was given one, or the model's."""

    concurrency: int = Field(default=64, ge=1)
    """Tasks under way at once."""

    output_dir: Path = Path("outputs/evaluate")
    """Where results.json and samples.jsonl are written; those of an earlier evaluation become results.1.json, …"""

    compare: Path | None = None
    """The results.json of an earlier evaluation on the same tasks: tells which of them changed, and
    shows what was said where it got worse."""

    dry_run: bool = False
    """Check the options and, with slurm, write the job script; start nothing."""

    @model_validator(mode="after")
    def _has_one_target(self) -> "EvaluateConfig":
        given = {"model": self.model, "run": self.run, "endpoint.base_url": self.endpoint.base_url}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise ValueError(
                f"{', '.join(named) or 'nothing'} is given to be evaluated; give one of --model, --run and "
                "--endpoint.base-url"
            )
        if self.chat_template is not None and self.endpoint.base_url is not None:
            raise ValueError(
                f"chat_template = '{self.chat_template}' with endpoint.base_url: an endpoint has its own; leave it out"
            )
        if self.max_tokens is not None and self.seq_len is not None and self.max_tokens >= self.seq_len:
            raise ValueError(f"max_tokens = {self.max_tokens} leaves no room for a prompt in seq_len = {self.seq_len}")
        return self
