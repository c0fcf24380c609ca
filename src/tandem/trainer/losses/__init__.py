"""Objectives: pure functions of streams, chosen by `loss.type`."""

from tandem.trainer.losses.normalization import loss_denominator, token_weights
from tandem.trainer.losses.objective import (
    PolicyLoss,
    ignores_zero_advantages,
    make_policy_loss,
    needs_entropy_gradient,
    needs_reference,
    needs_teacher,
)
from tandem.trainer.losses.types import LossOutput, PolicyStreams

__all__ = [
    "LossOutput",
    "PolicyLoss",
    "PolicyStreams",
    "ignores_zero_advantages",
    "loss_denominator",
    "make_policy_loss",
    "needs_entropy_gradient",
    "needs_reference",
    "needs_teacher",
    "token_weights",
]
