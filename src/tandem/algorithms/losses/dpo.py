"""DPO: -log σ(β ((c - c°) - (r - r°))) of each pair, with labels that may be wrong. https://arxiv.org/abs/2305.18290"""

from tandem.algorithms.losses.kind import AlignLoss, Losses, PairStreams
from tandem.algorithms.losses.preferences import (
    ANY_REFERENCE,
    WITH_REFERENCE,
    SmoothedOptions,
    implicit_rewards,
    pair_metrics,
    smoothed_log_sigmoid,
)


def dpo_loss(streams: PairStreams, beta: float, label_smoothing: float) -> Losses:
    """-(1 - ε) log σ(z) - ε log σ(-z) with z = β ((c - c°) - (r - r°))."""
    chosen, rejected = implicit_rewards(streams, beta)
    losses = smoothed_log_sigmoid(chosen - rejected, label_smoothing)
    return Losses(losses, pair_metrics(streams, chosen, rejected))


DPO = AlignLoss(
    "dpo",
    WITH_REFERENCE,
    dpo_loss,
    SmoothedOptions,
    ANY_REFERENCE,
)
