"""Options of the reward server."""

from pydantic import Field, model_validator

from tandem.config.goals import GoalOptions
from tandem.config.inference import ServerConfig
from tandem.config.shared import ComputeOptions, LengthOptions, LogOptions, ModelConfig


class RewardServerConfig(LogOptions, ComputeOptions, GoalOptions, LengthOptions):
    """The server that places texts in goal space, or scores them with a reward model."""

    model: ModelConfig | None = None
    """A reward model, which then scores texts and conversations (POST /score). Left out: goals (POST /goalspace)."""

    server: ServerConfig = ServerConfig()

    tokens_per_batch: int = Field(default=8192, ge=1)
    """Most tokens in one forward pass. Texts that wait at the same time are scored together."""

    @model_validator(mode="after")
    def _runs_our_decoder(self) -> "RewardServerConfig":
        if self.model is not None and self.model.impl != "native":
            raise ValueError(f"model.impl = {self.model.impl!r} cannot be served here; set it to 'native'")
        if self.model is not None and self.goals:
            raise ValueError("model.name and goals are both given; a reward model can be a goal: docs/rewards.md")
        return self
