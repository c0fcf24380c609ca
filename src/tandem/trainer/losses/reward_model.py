"""The objective of a reward model (Bradley-Terry): a pure function of scores. No model, no parallelism."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.trainer.losses.types import LossOutput


@dataclass(frozen=True)
class ScoreStreams:
    """One entry per pair."""

    chosen_scores: Tensor  # (pairs,), carries the gradient
    rejected_scores: Tensor  # (pairs,), carries the gradient
    margins: Tensor  # (pairs,), by how much the chosen one should at least win; 0: no demand


def reward_model_loss(streams: ScoreStreams, centering: float) -> LossOutput:
    """-log σ(s - s' - m) + λ (s + s')², summed over pairs.

    Pairs say nothing of where zero lies; λ, the centering, pulls the scores of a pair towards it.
    """
    gap = streams.chosen_scores - streams.rejected_scores
    preference = -F.logsigmoid(gap - streams.margins)
    center = (streams.chosen_scores + streams.rejected_scores).square()
    with torch.no_grad():
        metrics = {
            "rewards_chosen": streams.chosen_scores.sum(),
            "rewards_rejected": streams.rejected_scores.sum(),
            "margin": gap.sum(),
            "accuracy": (gap > 0).float().sum(),
            "loss/preference": preference.sum(),
            "loss/centering": centering * center.sum(),
        }
    return LossOutput((preference + centering * center).sum(), metrics)
