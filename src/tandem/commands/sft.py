"""Options of supervised fine-tuning."""

from pathlib import Path

from pydantic import model_validator

from tandem.commands.offline import OfflineConfig
from tandem.config.data import SFTDataConfig
from tandem.config.parallel import require_room


class SFTConfig(OfflineConfig):
    """Supervised fine-tuning on conversations, completions or plain text."""

    data: SFTDataConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen, so it cannot be replaced
    output_dir: Path = Path("outputs/sft")
    """Run directory. The model is written to weights/latest."""

    @model_validator(mode="after")
    def _consistent(self) -> "SFTConfig":
        require_room(self.tokens_per_microbatch, self.seq_len)
        return self
