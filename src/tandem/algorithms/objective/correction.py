"""Off-policy correction: how much a token counts, by how likely the trainer finds what the engine sampled."""

from typing import Literal

from pydantic import Field, model_validator

from tandem.algorithms.sequences import bounded_exp, sequence_log_ratios
from tandem.algorithms.tensors import Tensor
from tandem.config.base import Config


class CorrectionConfig(Config):
    """Off-policy correction: a weight on each token's loss from w = exp(trainer's log-prob - engine's log-prob)."""

    type: Literal["none", "truncate", "mask"] = "none"
    """truncate: w, clipped to [low, high]. mask: w inside [low, high], 0 outside."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """What w is computed over. token: each token. sequence: product over the sequence. geometric: geometric mean."""

    low: float = Field(default=0.0, ge=0)
    """Lower bound of w."""

    high: float = Field(default=2.0, gt=0, allow_inf_nan=True)
    """Upper bound of w. inf: none."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "CorrectionConfig":
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} and high = {self.high} leave no range; low must be below high")
        return self


def correction_weights(
    log_ratios: Tensor, sequences: Tensor, num_sequences: int, config: CorrectionConfig, *, is_weighted: bool
) -> Tensor:
    """(tokens,), without gradient, from w = exp(log-ratio) of the token or of its sequence.

    truncate: min(max(w, low), high). mask: w where low <= w <= high, else 0. If not `is_weighted`, the objective has
    the ratio in it already, and a mask is 1 where it is not 0.
    """
    log_ratios = log_ratios.detach()
    if config.level != "token":
        kind = "product" if config.level == "sequence" else "geometric"
        log_ratios = sequence_log_ratios(log_ratios, sequences, num_sequences, kind)
    weights = bounded_exp(log_ratios)
    if config.type == "truncate":
        return weights.clamp(config.low, config.high)
    is_within = (weights >= config.low) & (weights <= config.high)
    return (weights if is_weighted else weights.new_ones(len(weights))).masked_fill(~is_within, 0)
