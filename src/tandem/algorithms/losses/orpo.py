"""ORPO: an SFT loss and the log-odds ratio, no reference. https://arxiv.org/abs/2403.07691"""

from tandem.algorithms.losses.kind import AlignLoss, Losses, PairStreams
from tandem.algorithms.losses.preferences import (
    WITHOUT_REFERENCE,
    BetaOptions,
    log_odds,
    loss_parts,
    pair_metrics,
    per_token,
)
from tandem.algorithms.metrics import mean_of
from tandem.algorithms.tensors import log_sigmoid


def orpo_loss(streams: PairStreams, beta: float, mean_chosen_length: float) -> Losses:
    """-c / l - β log σ(o(c / |c|) - o(r / |r|)) with o(x) = x - log(1 - exp x), the log-odds, and l the mean of |c|."""
    chosen = per_token(streams.chosen_logprobs, streams.chosen_lengths)
    rejected = per_token(streams.rejected_logprobs, streams.rejected_lengths)
    log_odds_ratio = log_odds(chosen) - log_odds(rejected)
    preference = -beta * log_sigmoid(log_odds_ratio)
    imitation = -streams.chosen_logprobs / mean_chosen_length
    parts = loss_parts(preference, imitation) | {"log_odds_ratio": mean_of(log_odds_ratio)}
    metrics = pair_metrics(streams, beta * chosen, beta * rejected) | parts
    return Losses(imitation + preference, metrics)


ORPO = AlignLoss(
    "orpo",
    WITHOUT_REFERENCE,
    orpo_loss,
    BetaOptions,
    ("none",),
    facts=("mean_chosen_length",),
)
