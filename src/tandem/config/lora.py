"""Options of LoRA adapters."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, field_validator

from tandem.config.base import Config
from tandem.config.shared import ModelConfig
from tandem.utils.errors import UserError

# What our decoder has.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRAConfig(Config):
    """Train a low-rank adapter of the projections; the model itself is frozen."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapter of each projection."""

    alpha: float = Field(default=32.0, gt=0)
    """The adapter is scaled by alpha / rank, or by alpha / sqrt(rank) with rslora."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of the adapter. Above 0, trainer and engine give different log-probs."""

    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Projections with an adapter, by Hugging Face names (q_proj, v_proj, …). all-linear: all but the output matrix."""

    rslora: bool = False
    """Rank-stabilized scaling: alpha / sqrt(rank)."""

    @field_validator("targets")
    @classmethod
    def _some(cls, targets: list[str] | str) -> list[str] | str:
        if not targets:
            raise ValueError("targets = [] leaves nothing to train; name projections, or give 'all-linear'")
        return targets

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def check_lora(model: ModelConfig, lora: LoRAConfig | None) -> None:
    """Refuse what can be refused without looking at the model: our decoder has the same projections in all of them."""
    if lora is not None and model.impl == "native":
        refuse_unknown_targets(lora, TARGETS)


def refuse_unknown_targets(config: LoRAConfig, valid: Sequence[str]) -> None:
    unknown = [] if config.targets == "all-linear" else sorted(set(config.targets) - set(valid))
    if unknown:
        raise UserError(
            f"lora.targets names {', '.join(map(repr, unknown))}, which the model does not have; "
            f"valid: {', '.join(valid)}, or 'all-linear'"
        )
