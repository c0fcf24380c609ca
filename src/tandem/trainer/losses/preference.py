"""Objectives over pairs of completions: pure functions of per-sequence log-probs. No model, no parallelism.

With c and r the log-probs of the chosen and the rejected completion (sums over their tokens), c° and r° those of the
reference, |c| and |r| the numbers of tokens. Every loss is a sum over pairs; the caller divides by the pairs of the
step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.trainer.losses.metrics import Metric, loss_part, mean_of
from tandem.trainer.losses.types import LossOutput


@dataclass(frozen=True)
class PairStreams:
    """One entry per pair. Without a reference, its log-probs are zeros."""

    chosen_logprobs: Tensor  # (pairs,), c; carries the gradient
    rejected_logprobs: Tensor  # (pairs,), r; carries the gradient
    chosen_lengths: Tensor  # (pairs,), |c|
    rejected_lengths: Tensor  # (pairs,), |r|
    reference_chosen: Tensor  # (pairs,), c°
    reference_rejected: Tensor  # (pairs,), r°

    def __len__(self) -> int:
        return len(self.chosen_logprobs)


def dpo_loss(streams: PairStreams, beta: float, label_smoothing: float) -> LossOutput:
    """-(1 - ε) log σ(z) - ε log σ(-z) with z = β ((c - c°) - (r - r°))."""
    chosen, rejected = implicit_rewards(streams, beta)
    losses = smoothed_log_sigmoid(chosen - rejected, label_smoothing)
    return LossOutput(losses.sum(), pair_metrics(streams, chosen, rejected))


def hinge_loss(streams: PairStreams, beta: float) -> LossOutput:
    """max(0, 1 - z) with z = β ((c - c°) - (r - r°))."""
    chosen, rejected = implicit_rewards(streams, beta)
    losses = F.relu(1 - (chosen - rejected))
    return LossOutput(losses.sum(), pair_metrics(streams, chosen, rejected))


def ipo_loss(streams: PairStreams, beta: float) -> LossOutput:
    """((c - c°) / |c| - (r - r°) / |r| - 1 / 2β)²: per token, so that β means the same at every length."""
    chosen_mean = per_token(streams.chosen_logprobs - streams.reference_chosen, streams.chosen_lengths)
    rejected_mean = per_token(streams.rejected_logprobs - streams.reference_rejected, streams.rejected_lengths)
    losses = (chosen_mean - rejected_mean - 1 / (2 * beta)).square()
    return LossOutput(losses.sum(), pair_metrics(streams, beta * chosen_mean, beta * rejected_mean))


def simpo_loss(streams: PairStreams, beta: float, gamma: float, label_smoothing: float) -> LossOutput:
    """-(1 - ε) log σ(z) - ε log σ(-z) with z = β (c / |c| - r / |r|) - γ."""
    chosen = beta * per_token(streams.chosen_logprobs, streams.chosen_lengths)
    rejected = beta * per_token(streams.rejected_logprobs, streams.rejected_lengths)
    losses = smoothed_log_sigmoid(chosen - rejected - gamma, label_smoothing)
    return LossOutput(losses.sum(), pair_metrics(streams, chosen, rejected))


def cpo_loss(
    streams: PairStreams, beta: float, label_smoothing: float, sft_weight: float, mean_chosen_length: float
) -> LossOutput:
    """-(1 - ε) log σ(z) - ε log σ(-z) - w c / l with z = β (c - r), w the SFT weight, l the mean of |c| over the step.

    Summed over the pairs of the step and divided by their number, c / l is the mean over all chosen tokens.
    """
    chosen, rejected = beta * streams.chosen_logprobs, beta * streams.rejected_logprobs
    preference = smoothed_log_sigmoid(chosen - rejected, label_smoothing)
    imitation = -streams.chosen_logprobs / mean_chosen_length
    return LossOutput(
        (preference + sft_weight * imitation).sum(),
        pair_metrics(streams, chosen, rejected) | loss_parts(preference, imitation),
    )


def orpo_loss(streams: PairStreams, beta: float, mean_chosen_length: float) -> LossOutput:
    """-c / l - β log σ(o(c / |c|) - o(r / |r|)) with o(x) = x - log(1 - exp x), the log-odds, and l the mean of |c|."""
    chosen = per_token(streams.chosen_logprobs, streams.chosen_lengths)
    rejected = per_token(streams.rejected_logprobs, streams.rejected_lengths)
    log_odds_ratio = log_odds(chosen) - log_odds(rejected)
    preference = -beta * F.logsigmoid(log_odds_ratio)
    imitation = -streams.chosen_logprobs / mean_chosen_length
    parts = loss_parts(preference, imitation) | {"log_odds_ratio": mean_of(log_odds_ratio)}
    metrics = pair_metrics(streams, beta * chosen, beta * rejected) | parts
    return LossOutput((imitation + preference).sum(), metrics)


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
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p. A probability that rounds to one is taken as the largest below it."""
    below_one = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))


@torch.no_grad()
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
