"""IPO: a square, so that no margin is ever large enough to be free. https://arxiv.org/abs/2310.12036"""

from tandem.algorithms.losses.kind import AlignLoss, Losses, PairStreams
from tandem.algorithms.losses.preferences import ANY_REFERENCE, WITH_REFERENCE, BetaOptions, pair_metrics, per_token


def ipo_loss(streams: PairStreams, beta: float) -> Losses:
    """((c - c°) / |c| - (r - r°) / |r| - 1 / 2β)²: per token, so that β means the same at every length."""
    chosen_mean = per_token(streams.chosen_logprobs - streams.reference_chosen, streams.chosen_lengths)
    rejected_mean = per_token(streams.rejected_logprobs - streams.reference_rejected, streams.rejected_lengths)
    losses = (chosen_mean - rejected_mean - 1 / (2 * beta)).square()
    return Losses(losses, pair_metrics(streams, beta * chosen_mean, beta * rejected_mean))


IPO = AlignLoss(
    "ipo",
    WITH_REFERENCE,
    ipo_loss,
    BetaOptions,
    ANY_REFERENCE,
)
