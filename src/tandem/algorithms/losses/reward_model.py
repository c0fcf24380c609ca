"""A reward model: -log σ of the difference of scores (Bradley-Terry). https://arxiv.org/abs/2203.02155"""

from dataclasses import dataclass

from pydantic import Field

from tandem.algorithms.losses.kind import AlignLoss, Losses
from tandem.algorithms.metrics import loss_part, mean_of
from tandem.algorithms.registry import Options
from tandem.algorithms.sequences import is_last_token
from tandem.algorithms.tensors import Tensor, log_sigmoid


class RewardModelOptions(Options):
    centering: float = Field(
        default=0.0, ge=0, description="Weight of the penalty that centres scores at zero; {types}. {defaults}"
    )


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


def reward_model_loss(streams: ScoreStreams, centering: float) -> Losses:
    """-log σ(s - s' - m) + λ (s + s')², of each pair.

    Pairs say nothing of where zero lies; λ, the centering, pulls the scores of a pair towards it.
    """
    gap = streams.chosen_scores - streams.rejected_scores
    preference = -log_sigmoid(gap - streams.margins)
    center = (streams.chosen_scores + streams.rejected_scores).square()
    metrics = {
        "rewards_chosen": mean_of(streams.chosen_scores),
        "rewards_rejected": mean_of(streams.rejected_scores),
        "margin": mean_of(gap),
        "accuracy": mean_of(gap > 0),
        "loss/preference": loss_part(preference.sum()),
        "loss/centering": loss_part(centering * center.sum()),
    }
    return Losses(preference + centering * center, metrics)


REWARD_MODEL = AlignLoss("reward", "pairs, trains a reward model", reward_model_loss, RewardModelOptions, ("none",))
