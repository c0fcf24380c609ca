"""KTO: good completions gain, bad ones lose, relative to the KL of the policy. https://arxiv.org/abs/2402.01306"""

from pydantic import Field

from tandem.algorithms.losses.kind import AlignLoss, LabeledStreams, Losses
from tandem.algorithms.losses.labels import REFERENCES, WITH_REFERENCE, labeled_metrics
from tandem.algorithms.losses.preferences import BetaOptions


class KtoOptions(BetaOptions):
    desirable_weight: float = Field(default=1.0, ge=0, description="Weight of good completions; {types}. {defaults}")
    undesirable_weight: float = Field(default=1.0, ge=0, description="Weight of bad completions; {types}. {defaults}")


def kto_loss(
    streams: LabeledStreams, beta: float, kl: float, desirable_weight: float, undesirable_weight: float
) -> Losses:
    """w (1 - σ(β (u - k))) where good, w' (1 - σ(β (k - u))) where bad.

    k is the estimate of KL(policy || reference) for the whole step, see `mismatched_kl`; it carries no gradient.
    """
    advantages = streams.logprobs - streams.reference_logprobs - kl
    good = desirable_weight * (-beta * advantages).sigmoid()
    bad = undesirable_weight * (beta * advantages).sigmoid()
    losses = good.where(streams.is_good, bad)
    return Losses(losses, labeled_metrics(streams, beta))


def mismatched_kl(mean_log_ratio: float) -> float:
    """max(0, mean u), over completions under prompts they do not belong to."""
    return max(0.0, mean_log_ratio)


KTO = AlignLoss("kto", WITH_REFERENCE, kto_loss, KtoOptions, REFERENCES, is_paired=False, facts=("kl",))
