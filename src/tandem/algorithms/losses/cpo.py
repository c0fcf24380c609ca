"""CPO: DPO without a reference, and an SFT loss on the chosen completion. https://arxiv.org/abs/2401.08417"""

from pydantic import Field

from tandem.algorithms.losses.kind import AlignLoss, Losses, PairStreams
from tandem.algorithms.losses.preferences import (
    WITHOUT_REFERENCE,
    SmoothedOptions,
    loss_parts,
    pair_metrics,
    smoothed_log_sigmoid,
)


class CpoOptions(SmoothedOptions):
    sft_weight: float = Field(
        default=1.0, ge=0, description="Weight of the SFT loss on chosen completions; {types}. {defaults}"
    )


def cpo_loss(
    streams: PairStreams, beta: float, label_smoothing: float, sft_weight: float, mean_chosen_length: float
) -> Losses:
    """-(1 - ε) log σ(z) - ε log σ(-z) - w c / l with z = β (c - r), w the SFT weight, l the mean of |c| over the step.

    Summed over the pairs of the step and divided by their number, c / l is the mean over all chosen tokens.
    """
    chosen, rejected = beta * streams.chosen_logprobs, beta * streams.rejected_logprobs
    preference = smoothed_log_sigmoid(chosen - rejected, label_smoothing)
    imitation = -streams.chosen_logprobs / mean_chosen_length
    return Losses(
        preference + sft_weight * imitation,
        pair_metrics(streams, chosen, rejected) | loss_parts(preference, imitation),
    )


CPO = AlignLoss(
    "cpo",
    WITHOUT_REFERENCE,
    cpo_loss,
    CpoOptions,
    ("none",),
    facts=("mean_chosen_length",),
)
