"""Options of alignment on preferences: DPO and its family, and reward models."""

from pathlib import Path

from pydantic import model_validator

from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.commands.offline import OfflineConfig
from tandem.config.data import AlignDataConfig


class AlignConfig(OfflineConfig):
    """Alignment on preferences: rows with `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`."""

    data: AlignDataConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen, so it cannot be replaced
    loss: AlignLossConfig = AlignLossConfig()
    output_dir: Path = Path("outputs/align")
    """Run directory. The model is written to weights/latest."""

    @property
    def pair_tokens(self) -> int:
        """Of the longest pair. A reward model reads one token more of each."""
        return 2 * (self.seq_len + (self.loss.type == "reward"))

    @model_validator(mode="after")
    def _consistent(self) -> "AlignConfig":
        if self.loss.type == "reward" and (self.lora is not None or self.model.impl == "hf"):
            raise ValueError("loss.type = 'reward' trains the whole native decoder; leave out lora and model.impl")
        room = self.pair_tokens
        if 0 < self.tokens_per_microbatch < room:
            raise ValueError(
                f"tokens_per_microbatch = {self.tokens_per_microbatch} cannot hold a pair of seq_len = {self.seq_len}; "
                f"the smallest valid value is {room}"
            )
        if self.loss.type == "kto" and self.batch_size == 1:
            raise ValueError(
                "batch_size = 1 with loss.type = 'kto': its KL estimate needs completions of other prompts in "
                "the same step; the smallest valid value is 2"
            )
        return self
