"""SimPO: mean log-probs, a margin, no reference. https://arxiv.org/abs/2405.14734"""

from pydantic import Field

from tandem.algorithms.losses.kind import AlignLoss, Losses, PairStreams
from tandem.algorithms.losses.preferences import (
    WITHOUT_REFERENCE,
    Beta,
    SmoothedOptions,
    pair_metrics,
    per_token,
    smoothed_log_sigmoid,
)


class SimpoOptions(SmoothedOptions):
    beta: Beta = 2.0
    gamma: float = Field(
        default=0.5, ge=0, description="Margin by which the chosen completion should win; {types}. {defaults}"
    )


def simpo_loss(streams: PairStreams, beta: float, gamma: float, label_smoothing: float) -> Losses:
    """-(1 - ε) log σ(z) - ε log σ(-z) with z = β (c / |c| - r / |r|) - γ."""
    chosen = beta * per_token(streams.chosen_logprobs, streams.chosen_lengths)
    rejected = beta * per_token(streams.rejected_logprobs, streams.rejected_lengths)
    losses = smoothed_log_sigmoid(chosen - rejected - gamma, label_smoothing)
    return Losses(losses, pair_metrics(streams, chosen, rejected))


SIMPO = AlignLoss(
    "simpo",
    WITHOUT_REFERENCE,
    simpo_loss,
    SimpoOptions,
    ("none",),
)
