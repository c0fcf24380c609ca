"""Options that more than one process takes. Each is defined here once and included where it is needed.

Classes called …Options are bases of the config classes that take them; `--help` shows those of the last base first.
"""

import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from tandem.config.base import Config
from tandem.utils.errors import UserError
from tandem.utils.hub import find_model

Impl = Literal["native", "hf"]
LogLevel = Literal["debug", "info", "warning", "error"]
Device = Literal["auto", "cpu", "cuda"]


class ModelConfig(Config):
    """The model, in Hugging Face format."""

    name: Annotated[Path, AfterValidator(find_model)]
    """Directory with config.json, *.safetensors and tokenizer.json, or a name on the Hugging Face hub (org/name): taken
    from the hub's cache, and fetched into it first unless HF_HUB_OFFLINE is set (short: --model)."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision. The trainer keeps its master weights in float32 either way."""

    impl: Impl = "native"
    """The model code of the trainer. native: our decoder (Llama, Mistral, Qwen2, Qwen3). hf: transformers, for most
    others (docs/lora.md). inference.engine chooses what serves the model."""

    chat_template: Path | None = None
    """Jinja file with a chat template in place of the model's own: for prompts, for rows of `sft` and `align`, and in
    servers. The models that a run writes have it too."""

    def read_chat_template(self) -> str | None:
        """The text of the file; None: the model's own is meant."""
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"model.chat_template = {str(self.chat_template)!r} cannot be read: {reason}; give a Jinja file"
            ) from error

    trust_remote_code: bool = False
    """Run the Python code that a model brings (auto_map in its config.json), with impl = "hf" and with engine = "vllm",
    that of reference and teacher models too. Give it only for models whose code you would run yourself."""


class LengthOptions(Config):
    """How long the sequences of a model are."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest sequence, prompt and completion together, in tokens."""


class ModelOptions(LengthOptions):
    """Which model, and how long its sequences are."""

    model: ModelConfig


class SeedOptions(Config):
    """What may depend on chance."""

    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Seed of all randomness: the order of tasks or rows, sampling, training."""

    deterministic: bool = False
    """Make the run repeat bit for bit on the same machine. Needs orchestrator.max_staleness = 0. The server's log-probs
    are then those of the trainer, to the bit, whatever else is running. Slower."""


class ComputeOptions(Config):
    """What a process computes on."""

    device: Device = "auto"
    """Where to compute. auto: a GPU if there is one."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads. None: all cores (under `rl`, its share of them)."""


class LogOptions(Config):
    """What a process says of itself."""

    log_level: LogLevel = "info"
    """Least severe log lines to show."""


def root_url(url: str) -> str:
    """A server's address, given with or without the /v1 that OpenAI's clients want. Raises ValueError."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(f"{url!r} is not the address of a server; give one like 'http://127.0.0.1:8000'")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


ServerUrl = Annotated[str, AfterValidator(root_url)]


class KeyOptions(Config):
    """The API key of a server."""

    section: ClassVar[str]  # what the options of the subclass stand under, for messages

    api_key: str | None = Field(default=None, min_length=1)
    """API key of the server, needed on every route but /health (short, where it is our own server: --api-key). Prefer
    api_key_var: other users can see flags."""

    api_key_var: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the API key (short, where it is our own server: --api-key-var)."""

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if self.api_key and self.api_key_var:
            raise ValueError("api_key and api_key_var are both given; give one of them")
        return self

    def resolve_api_key(self) -> str | None:
        """The key itself, or the one in the environment variable; an unset variable is an error."""
        return self.api_key or key_from_environment(self.api_key_var, f"{self.section}.api_key_var")


def key_from_environment(variable: str | None, option: str) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise UserError(f"{option} = {variable!r} names an environment variable that is not set; export it")
    return key


def steps_or_share(value: float) -> float:
    """The value, if it is a whole number or below 1. Raises ValueError."""
    if value >= 1 and value != int(value):
        raise ValueError(f"{value:g} is neither a whole number of steps nor a fraction below 1")
    return value


def num_steps(value: float, max_steps: int) -> int:
    """What a number of steps, or a fraction of training, comes to; rounded up, as in transformers."""
    return int(value) if value >= 1 else math.ceil(Fraction(str(value)) * max_steps)  # 0.07 of 100 is 7, not 8


Steps = Annotated[float, Field(ge=0), AfterValidator(steps_or_share)]
Interval = Annotated[Steps, Field(gt=0)]


class CheckpointConfig(Config):
    """When to save checkpoints, and how many to keep."""

    every: Interval | None = 25
    """Save every so many steps, or below 1 every such fraction of training, and after the last step. None: only when a
    signal ends the run."""

    keep_last: int = Field(default=2, ge=1)
    """Number of newest complete checkpoints to keep."""

    keep_every: int | None = Field(default=None, ge=1)
    """Also keep the checkpoints of every so many steps for good. None: keep no others."""

    on_signal_timeout_s: float = Field(default=25.0, ge=0)
    """On Ctrl-C, SIGTERM or SIGHUP the trainer finishes its step and saves a checkpoint, within this time. A second
    signal ends it at once. SLURM kills 30 s after SIGTERM. 0: end at once and save nothing."""

    @model_validator(mode="after")
    def _keeps_what_is_saved(self) -> "CheckpointConfig":
        if self.keep_every is None:
            return self
        if self.every is None:
            raise ValueError(f"checkpoint.keep_every = {self.keep_every} keeps nothing; set checkpoint.every as well")
        if self.every < 1:
            raise ValueError(
                f"checkpoint.keep_every = {self.keep_every} counts steps, and checkpoint.every = {self.every:g} is a "
                "fraction of training; give checkpoint.every as a number of steps"
            )
        every = int(self.every)
        if self.keep_every % every != 0:
            raise ValueError(
                f"checkpoint.keep_every = {self.keep_every} names steps that checkpoint.every = {every} does not "
                f"save; the nearest valid value is {max(1, round(self.keep_every / every)) * every}"
            )
        return self

    def is_due(self, step: int, max_steps: int) -> bool:
        return self.every is not None and (step == max_steps or step % num_steps(self.every, max_steps) == 0)


class RunOptions(Config):
    """The run: where it is, how long it is, how it goes on."""

    output_dir: Path = Path("outputs/rl")
    """Run directory, shared by all processes of the run. The model is written to weights/latest."""

    max_steps: int = Field(default=100, ge=1)
    """Training steps of the run."""

    checkpoint: CheckpointConfig = CheckpointConfig()

    resume: bool = False
    """Continue the run in output_dir from its newest complete checkpoint. --resume DIR: continue the run in DIR
    with the configuration it was started with; other flags win over that."""

    @field_validator("output_dir", mode="before")
    @classmethod
    def _is_given(cls, value: object) -> object:
        if value == "":
            raise ValueError("'' names no directory; '.' is this one")
        return value


class SyncOptions(Config):
    """How often the inference server gets new weights."""

    sync_every: int = Field(default=1, ge=1)
    """Weight sync after every so many steps, and after the last. More than 1 saves time and makes rollouts older: needs
    orchestrator.max_staleness of at least sync_every - 1."""


class StartOptions(Config):
    """What a command that starts a run does with one that is there, and whether it starts anything."""

    allow_changes: bool = False
    """Resume even if options changed that affect what is learned."""

    clean: bool = False
    """Delete the run in output_dir first."""

    dry_run: bool = False
    """Check everything, write the resolved configuration and, of `rl`, the process plan; start nothing."""


class MetricsConfig(Config):
    """Where metrics go besides metrics.jsonl."""

    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Trackers to send metrics to. Each needs its extra installed."""

    project: str | None = None
    """Project name in W&B and trackio. None: WANDB_PROJECT, or tandem."""

    run_name: str | None = None
    """Run name in W&B and trackio. None: WANDB_NAME, or the name of the output directory."""

    wandb_mode: Literal["online", "offline"] | None = None
    """W&B mode. offline: write to the run directory (or WANDB_DIR), upload nothing. None: WANDB_MODE, or online."""


class OptimizerConfig(Config):
    """AdamW."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""

    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    """Decay rates of the first and second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator, so that it is never zero."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, for matrices only."""

    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Clip the global gradient norm to this. inf: no clipping."""


class SchedulerConfig(Config):
    """Learning-rate schedule."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""

    warmup_steps: Steps = 0
    """Steps of linear warm-up from zero; below 1, such a fraction of training."""

    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate of the last step as a fraction of the peak, for linear and cosine. 0: it would be zero after the
    last step, as in transformers."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the rate of a step depends on how many there are."""
        return self.type != "constant" or 0 < self.warmup_steps < 1


def lr_factor(step: int, max_steps: int, config: SchedulerConfig) -> float:
    """The learning rate of `step` (from 1) as a fraction of the peak."""
    warmup_steps = num_steps(config.warmup_steps, max_steps)
    if step <= warmup_steps:
        return step / warmup_steps
    if config.type == "constant" or max_steps == 1:
        return 1.0
    # A step with a rate of zero would learn nothing: where the decay ends at zero, it begins one step later.
    num_decayed = step - warmup_steps - (config.min_lr_ratio == 0)
    progress = num_decayed / max(1, max_steps - warmup_steps)
    decay = 1 - progress if config.type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * decay
