"""Objectives over single completions that were called good or bad: pure functions of per-sequence log-probs.

With y the log-prob of a completion (the sum over its tokens), y° that of the reference and u = y - y°. Every loss is a
sum over completions; the caller divides by the completions of the step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.trainer.losses.metrics import Metric, mean_of
from tandem.trainer.losses.types import LossOutput


@dataclass(frozen=True)
class LabeledStreams:
    """One entry per completion. Without a reference, its log-probs are zeros."""

    logprobs: Tensor  # (completions,), y; carries the gradient
    reference_logprobs: Tensor  # (completions,), y°
    is_good: Tensor  # (completions,) bool
    lengths: Tensor  # (completions,), numbers of tokens

    def __len__(self) -> int:
        return len(self.logprobs)


@dataclass(frozen=True)
class RewardShift:
    """BCO's δ, halfway between the mean rewards of good and of bad completions of all steps so far.

    It moves by whole steps, so that it does not depend on how a step is divided. Before the first step δ is 0, which
    is exact: the policy is still the reference, and every reward 0.
    """

    good_sum: float = 0.0
    num_good: float = 0.0
    bad_sum: float = 0.0
    num_bad: float = 0.0

    @property
    def delta(self) -> float:
        return 0.5 * (self.good_sum / max(1.0, self.num_good) + self.bad_sum / max(1.0, self.num_bad))

    def updated(self, good_sum: float, num_good: float, bad_sum: float, num_bad: float) -> "RewardShift":
        """With the sums of rewards of one more step."""
        return RewardShift(
            self.good_sum + good_sum, self.num_good + num_good, self.bad_sum + bad_sum, self.num_bad + num_bad
        )


def kto_loss(
    streams: LabeledStreams, beta: float, kl: float, desirable_weight: float, undesirable_weight: float
) -> LossOutput:
    """w (1 - σ(β (u - k))) where good, w' (1 - σ(β (k - u))) where bad.

    k is the estimate of KL(policy || reference) for the whole step, see `mismatched_kl`; it carries no gradient.
    """
    advantages = streams.logprobs - streams.reference_logprobs - kl
    good = desirable_weight * torch.sigmoid(-beta * advantages)
    bad = undesirable_weight * torch.sigmoid(beta * advantages)
    losses = torch.where(streams.is_good, good, bad)
    return LossOutput(losses.sum(), labeled_metrics(streams, beta))


def bco_loss(streams: LabeledStreams, beta: float, delta: float) -> LossOutput:
    """-log σ(β u - δ) where good, -log σ(δ - β u) where bad; δ is the `RewardShift`."""
    shifted = beta * (streams.logprobs - streams.reference_logprobs) - delta
    losses = -F.logsigmoid(torch.where(streams.is_good, shifted, -shifted))
    return LossOutput(losses.sum(), labeled_metrics(streams, beta))


def mismatched_kl(mean_log_ratio: float) -> float:
    """max(0, mean u), over completions under prompts they do not belong to."""
    return max(0.0, mean_log_ratio)


@torch.no_grad()
def labeled_metrics(streams: LabeledStreams, beta: float) -> dict[str, Metric]:
    """Means over the good and over the bad completions."""
    rewards = beta * (streams.logprobs - streams.reference_logprobs)
    return {
        "rewards_chosen": mean_of(rewards, where=streams.is_good),
        "rewards_rejected": mean_of(rewards, where=~streams.is_good),
        "logprobs_chosen": mean_of(streams.logprobs, where=streams.is_good),
        "logprobs_rejected": mean_of(streams.logprobs, where=~streams.is_good),
    }
