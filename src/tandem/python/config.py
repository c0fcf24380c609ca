"""Options of `run_rl_training`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from tandem.algorithms.advantages import AdvantageConfig
from tandem.commands.batches import BatchOptions
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.config.explain import explain_validation_error
from tandem.config.sampling import EvalConfig, SamplingConfig
from tandem.config.shared import ModelConfig, SeedOptions, SyncOptions
from tandem.envs.config import EnvConfig
from tandem.python.callables import custom_import_path, replace_callables
from tandem.utils.errors import UserError

UNLIMITED_S = 1e9


class RLTrainingConfig(BatchOptions, SamplingConfig, SyncOptions, SeedOptions):
    """What `run_rl_training` does. Whatever is about one part is given there: learning rate and loss to the training
    backend, memory to the engines."""

    num_steps: int = Field(ge=1)
    """Training steps."""

    advantage: str | Callable[..., Any] = "grpo"
    """How rewards become advantages, as in orchestrator.advantage.type: grpo, dr_grpo, rloo, …, or a function."""

    overlap: bool = False
    """Generate the next batch while this one is trained on: faster, and rollouts are one version older."""

    eval: EvalConfig | None = None
    """Evaluate on held-out tasks, before the first step, after the last, and every so many. Left out: never."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest sequence, prompt and completion together, in tokens."""

    chat_template: Path | None = None
    """Jinja file with a chat template in place of the model's own; the models that are written have it too."""

    reward_timeout_s: float = Field(default=60.0, gt=0)
    """How long the reward may take for one completion. That of an environment has the environment's own limits."""

    reward_tries: int = Field(default=3, ge=1)
    """Attempts at a task whose rewards fail, before the task is set aside."""

    worker_timeout_s: float = Field(default=1800.0, gt=0)
    """How long a worker may take to answer one message, or to start again. Past that, it counts as dead."""

    if not TYPE_CHECKING:  # which knows the options otherwise

        def __init__(self, **options: Any) -> None:
            try:
                super().__init__(**replace_callables(options, custom_import_path))
            except ValidationError as error:
                problem = explain_validation_error(RLTrainingConfig, error)
                raise UserError(f"RLTrainingConfig: {problem}") from error

    def orchestrator(
        self, model_dir: Path = Path(), output_dir: Path = Path(), env: EnvConfig | None = None
    ) -> OrchestratorConfig:
        """The same for the loop. Without an environment, the tasks and their reward are objects."""
        shared = {name: getattr(self, name) for name in (*BatchOptions.model_fields, "seq_len", "seed", "sync_every")}
        return OrchestratorConfig(
            **shared,
            model=ModelConfig(name=model_dir, chat_template=self.chat_template),
            output_dir=output_dir,
            max_steps=self.num_steps,
            env=env or EnvConfig(tries=self.reward_tries),
            sampling=SamplingConfig(**{name: getattr(self, name) for name in SamplingConfig.model_fields}),
            advantage=AdvantageConfig(type=str(self.advantage)),
            eval=self.eval or EvalConfig(),
            max_staleness=self.sync_every - 1 + self.overlap,
            weights_timeout_s=UNLIMITED_S,  # the backend says when there will be none
        )

    @model_validator(mode="after")
    def _suits_the_orchestrator(self) -> "RLTrainingConfig":
        try:
            self.orchestrator()
        except ValidationError as error:
            raise ValueError(explain_validation_error(OrchestratorConfig, error)) from None
        return self
