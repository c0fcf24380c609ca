"""Objectives: a loss with what surrounds it, chosen by `loss.type`; custom losses import what they need from here."""

from tandem.algorithms.losses.kind import LabeledStreams, Losses, LossOutput, PairStreams, PolicyStreams
from tandem.algorithms.metrics import Metric, loss_part, maximum_of, mean_of
from tandem.trainer.losses.normalization import loss_denominator, token_weights
from tandem.trainer.losses.objective import (
    PolicyLoss,
    ignores_zero_advantages,
    make_policy_loss,
    needs_entropy_gradient,
    needs_reference,
    needs_teacher,
)

__all__ = [
    "LabeledStreams",
    "LossOutput",
    "Losses",
    "Metric",
    "PairStreams",
    "PolicyLoss",
    "PolicyStreams",
    "ignores_zero_advantages",
    "loss_denominator",
    "loss_part",
    "make_policy_loss",
    "maximum_of",
    "mean_of",
    "needs_entropy_gradient",
    "needs_reference",
    "needs_teacher",
    "token_weights",
]
