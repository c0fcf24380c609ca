"""Options of the reward server."""

from pydantic import Field, model_validator

from tandem.config.inference import ServerConfig
from tandem.config.shared import ComputeOptions, LogOptions, ModelOptions


class RewardServerConfig(LogOptions, ComputeOptions, ModelOptions):
    """The server that scores texts with a reward model."""

    server: ServerConfig = ServerConfig()

    tokens_per_batch: int = Field(default=8192, ge=1)
    """Most tokens in one forward pass. Texts that wait at the same time are scored together."""

    @model_validator(mode="after")
    def _runs_our_decoder(self) -> "RewardServerConfig":
        if self.model.impl != "native":
            raise ValueError(f"model.impl = {self.model.impl!r} cannot be served here; set it to 'native'")
        return self
