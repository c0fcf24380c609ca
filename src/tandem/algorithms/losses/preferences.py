"""What losses over pairs share.

With c and r the log-probs of the chosen and the rejected completion (sums over their tokens), c° and r° those of the
reference, |c| and |r| the numbers of tokens. Every loss is one per pair; the caller divides their sum by the pairs of
the step.
"""

from typing import Annotated

from pydantic import Field

from tandem.algorithms.losses.kind import PairStreams, ReferenceSource
from tandem.algorithms.metrics import Metric, loss_part, mean_of
from tandem.algorithms.registry import Options
from tandem.algorithms.tensors import Tensor, log_sigmoid

Beta = Annotated[
    float, Field(gt=0, description="Scale of the implicit rewards (orpo: weight of the odds ratio). {defaults}")
]
LabelSmoothing = Annotated[
    float, Field(ge=0, lt=0.5, description="Share of labels assumed to be wrong; {types}. {defaults}")
]
WITH_REFERENCE = "pairs, with a reference model"
WITHOUT_REFERENCE = "pairs, without one"
ANY_REFERENCE: tuple[ReferenceSource, ...] = ("precomputed", "model", "none")
EPSILONS = {4: 2.0**-23, 8: 2.0**-52}  # the distance from 1 to the next number, by the bytes of a number


class BetaOptions(Options):
    beta: Beta = 0.1


class SmoothedOptions(BetaOptions):
    label_smoothing: LabelSmoothing = 0.0


def per_token(sums: Tensor, lengths: Tensor) -> Tensor:
    """Means over the tokens of completions; of an empty one, whose sum is 0, it is 0."""
    return sums / lengths.clamp(min=1)


def implicit_rewards(streams: PairStreams, beta: float) -> tuple[Tensor, Tensor]:
    """β (c - c°) and β (r - r°)."""
    chosen = beta * (streams.chosen_logprobs - streams.reference_chosen)
    rejected = beta * (streams.rejected_logprobs - streams.reference_rejected)
    return chosen, rejected


def smoothed_log_sigmoid(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - ε) log σ(z) - ε log σ(-z): the labels are taken to be wrong with probability ε."""
    return -(1 - label_smoothing) * log_sigmoid(logits) - label_smoothing * log_sigmoid(-logits)


def log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p. A probability that rounds to one is taken as the largest below it."""
    below_one = logprobs.clamp(max=-EPSILONS[logprobs.element_size()])
    return below_one - (-below_one.expm1()).log()


def pair_metrics(streams: PairStreams, chosen_rewards: Tensor, rejected_rewards: Tensor) -> dict[str, Metric]:
    """Means over pairs of what people watch."""
    return {
        "rewards_chosen": mean_of(chosen_rewards),
        "rewards_rejected": mean_of(rejected_rewards),
        "margin": mean_of(chosen_rewards - rejected_rewards),
        "accuracy": mean_of(chosen_rewards > rejected_rewards),
        "logprobs_chosen": mean_of(streams.chosen_logprobs),
        "logprobs_rejected": mean_of(streams.rejected_logprobs),
    }


def loss_parts(preference: Tensor, imitation: Tensor) -> dict[str, Metric]:
    return {"loss/preference": loss_part(preference.sum()), "loss/sft": loss_part(imitation.sum())}
