"""The objective of a reward model (Bradley-Terry): a pure function of scores. No model, no parallelism."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.trainer.losses.metrics import loss_part, mean_of
from tandem.trainer.losses.sequences import is_last_token
from tandem.trainer.losses.types import LossOutput


@dataclass(frozen=True)
class ScoreStreams:
    """One entry per pair."""

    chosen_scores: Tensor  # (pairs,), carries the gradient
    rejected_scores: Tensor  # (pairs,), carries the gradient
    margins: Tensor  # (pairs,), by how much the chosen one should at least win; 0: no demand


def score_streams(scores: Tensor, margins: Tensor, sequences: Tensor) -> ScoreStreams:
    """(tokens,) each -> pairs. The score of a sequence is that of its last token; the chosen one of a pair is first."""
    last = is_last_token(sequences)
    scores, margins = scores[last], margins[last]
    return ScoreStreams(scores[0::2], scores[1::2], margins[0::2])


def reward_model_loss(streams: ScoreStreams, centering: float) -> LossOutput:
    """-log σ(s - s' - m) + λ (s + s')², summed over pairs.

    Pairs say nothing of where zero lies; λ, the centering, pulls the scores of a pair towards it.
    """
    gap = streams.chosen_scores - streams.rejected_scores
    preference = -F.logsigmoid(gap - streams.margins)
    center = (streams.chosen_scores + streams.rejected_scores).square()
    with torch.no_grad():
        metrics = {
            "rewards_chosen": mean_of(streams.chosen_scores),
            "rewards_rejected": mean_of(streams.rejected_scores),
            "margin": mean_of(gap),
            "accuracy": mean_of(gap > 0),
            "loss/preference": loss_part(preference.sum()),
            "loss/centering": loss_part(centering * center.sum()),
        }
    return LossOutput((preference + centering * center).sum(), metrics)
