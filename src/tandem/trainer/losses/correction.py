"""Off-policy correction: how much a token counts, by how likely the trainer finds what the engine sampled."""

import torch
from torch import Tensor

from tandem.algorithms.objective.policy import CorrectionConfig
from tandem.trainer.losses.ratios import bounded_exp, sequence_log_ratios


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
    return torch.where(is_within, weights if is_weighted else torch.ones_like(weights), 0)
