"""Objectives: pure functions of streams, chosen by `loss.type`."""

from tandem.trainer.losses.metrics import Metric, loss_part, maximum_of, mean_of
from tandem.trainer.losses.normalization import loss_denominator, token_weights
from tandem.trainer.losses.objective import (
    PolicyLoss,
    ignores_zero_advantages,
    make_policy_loss,
    needs_entropy_gradient,
    needs_reference,
    needs_teacher,
)
from tandem.trainer.losses.preference import PairStreams
from tandem.trainer.losses.types import Losses, LossOutput, PolicyStreams
from tandem.trainer.losses.unpaired import LabeledStreams

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
