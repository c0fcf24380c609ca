"""Options of the reward server."""

from pydantic import Field, model_validator

from tandem.config.base import Config
from tandem.config.inference import ServerConfig
from tandem.config.shared import Device, LogLevel, ModelConfig


class RewardServerConfig(Config):
    """The server that scores texts with a reward model."""

    model: ModelConfig
    server: ServerConfig = ServerConfig()

    seq_len: int = Field(default=2048, ge=1)
    """Longest text, in tokens. Longer ones are refused."""

    tokens_per_batch: int = Field(default=8192, ge=1)
    """Most tokens in one forward pass. Texts that wait at the same time are scored together."""

    device: Device = "auto"
    """Where to compute. auto: a GPU if there is one."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads. None: all cores."""

    log_level: LogLevel = "info"
    """Least severe log lines to show."""

    @model_validator(mode="after")
    def _runs_our_decoder(self) -> "RewardServerConfig":
        if self.model.impl != "native":
            raise ValueError(f"model.impl = {self.model.impl!r} cannot be served here; set it to 'native'")
        return self
