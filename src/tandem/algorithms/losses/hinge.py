"""The hinge loss of SLiC-HF: max(0, 1 - z) with z = β ((c - c°) - (r - r°)). https://arxiv.org/abs/2305.10425"""

from tandem.algorithms.losses.kind import AlignLoss, Losses, PairStreams
from tandem.algorithms.losses.preferences import (
    ANY_REFERENCE,
    WITH_REFERENCE,
    BetaOptions,
    implicit_rewards,
    pair_metrics,
)


def hinge_loss(streams: PairStreams, beta: float) -> Losses:
    """max(0, 1 - z) with z = β ((c - c°) - (r - r°))."""
    chosen, rejected = implicit_rewards(streams, beta)
    losses = (1 - (chosen - rejected)).relu()
    return Losses(losses, pair_metrics(streams, chosen, rejected))


HINGE = AlignLoss(
    "hinge",
    WITH_REFERENCE,
    hinge_loss,
    BetaOptions,
    ANY_REFERENCE,
)
